//! Records of arrays side by side: batches, their last, splits, ranks, and what is said of arrays that do not fit together.

use std::collections::HashSet;
use std::fs;
use std::path::{Path, PathBuf};

use ebbtide_loader::{Error, LastBatch, RecordLoader, RecordOptions, RecordSet, Share};
use proptest::prelude::*;
use tempfile::{TempDir, tempdir};

/// An array as NumPy writes it.
fn npy(folder: &Path, name: &str, descr: &str, shape: &str, data: &[u8]) -> PathBuf {
    let mut header =
        format!("{{'descr': '{descr}', 'fortran_order': False, 'shape': {shape}, }}").into_bytes();
    header.resize((10 + header.len() + 1).next_multiple_of(64) - 11, b' ');
    header.push(b'\n');
    let mut bytes = b"\x93NUMPY\x01\x00".to_vec();
    bytes.extend((header.len() as u16).to_le_bytes());
    bytes.extend(header);
    bytes.extend(data);
    let path = folder.join(name);
    fs::write(&path, bytes).unwrap();
    path
}

/// Images of 2 × 3 bytes, all of which are the record's number, and their labels, its number too.
fn set(count: u32) -> (TempDir, RecordSet) {
    let folder = tempdir().unwrap();
    let pixels: Vec<u8> = (0..count).flat_map(|i| [i as u8; 6]).collect();
    let labels: Vec<u8> = (0..count).flat_map(u32::to_le_bytes).collect();
    let images = npy(folder.path(), "images.npy", "|u1", &format!("({count}, 2, 3)"), &pixels);
    let labels = npy(folder.path(), "labels.npy", "<i4", &format!("({count},)"), &labels);
    let set = RecordSet::open(&[images, labels]).unwrap();
    (folder, set)
}

fn labels(bytes: &[u8]) -> Vec<u32> {
    bytes.as_chunks().0.iter().map(|&label| u32::from_le_bytes(label)).collect()
}

/// The labels of some steps, each held against its image.
fn delivered(set: &RecordSet, options: RecordOptions, from: u64, steps: u64) -> Vec<(u64, Vec<u32>)> {
    let mut loader = RecordLoader::new(set, options, from).unwrap();
    (from..from + steps)
        .map(|step| {
            let batch = loader.next().unwrap();
            assert_eq!(batch.step, step + 1);
            let found = labels(&batch.fields[1]);
            for (label, image) in found.iter().zip(batch.fields[0].chunks(6)).take(batch.records) {
                assert_eq!(image, [*label as u8; 6], "an image and its label");
            }
            if options.last == LastBatch::Pad {
                assert_eq!(found.len(), options.batch);
                assert!(found[batch.records..].iter().all(|&label| label == 0));
            }
            let (epoch, found) = (batch.epoch, found[..batch.records].to_vec());
            loader.recycle(batch);
            (epoch, found)
        })
        .collect()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(40))]

    /// Every record once an epoch, whichever the ranks, and any step may be the first.
    #[test]
    fn an_epoch_has_each_record_once(
        count in 1u32..200, batch in 1usize..9, world in 1u64..4, seed: u64, shuffle: bool, from in 0u64..5,
        last in prop_oneof![Just(LastBatch::Keep), Just(LastBatch::Pad), Just(LastBatch::Drop)],
    ) {
        let (_folder, set) = set(count);
        let of_all = batch as u64 * world;
        prop_assume!(last != LastBatch::Drop || of_all <= u64::from(count));
        let steps = match last {
            LastBatch::Drop => u64::from(count) / of_all,
            _ => u64::from(count).div_ceil(of_all),
        };
        let mut first_epoch = HashSet::new();
        let mut seen = 0;
        for rank in 0..world {
            let options = RecordOptions { batch, last, seed, shuffle, share: Share { rank, world }, ahead: 2 };
            let all = delivered(&set, options, 0, steps + from + 2);
            prop_assert_eq!(&delivered(&set, options, from, 2)[..], &all[from as usize..from as usize + 2]);
            for (_, labels) in all.iter().take(steps as usize) {
                seen += labels.len();
                first_epoch.extend(labels.iter().copied());
            }
            prop_assert_eq!((all[0].0, all[steps as usize].0), (0, 1));
        }
        prop_assert_eq!(first_epoch.len(), seen, "a record came twice");
        let expected = if last == LastBatch::Drop { steps * of_all } else { u64::from(count) };
        prop_assert_eq!(seen as u64, expected);
    }

    #[test]
    fn parts_never_overlap(count in 2u32..300, fraction in 0.0f64..0.9, seed: u64) {
        let (_folder, set) = set(count);
        let aside = (f64::from(count) * fraction).round() as u64;
        prop_assume!(aside < u64::from(count));
        let (training, validation) = set.split(fraction, seed).unwrap();
        prop_assert_eq!((training.len(), validation.len()), (u64::from(count) - aside, aside));
        let rows = |set: &RecordSet| (0..set.len()).map(|i| set.row(i)).collect::<HashSet<u64>>();
        let (training, validation) = (rows(&training), rows(&validation));
        prop_assert!(training.is_disjoint(&validation));
        prop_assert_eq!(training.len() + validation.len(), count as usize);
    }
}

#[test]
fn fields_say_what_they_are() {
    let (_folder, set) = set(10);
    let [images, labels] = set.fields() else { panic!() };
    assert_eq!((&*images.descr, &images.shape[..], images.record_bytes), ("|u1", &[2, 3][..], 6));
    assert_eq!((&*labels.descr, &labels.shape[..], labels.record_bytes), ("<i4", &[][..], 4));
    let mut out = [0; 6];
    set.read(7, 0, &mut out).unwrap();
    assert_eq!(out, [7; 6]);
    assert!(set.read(10, 0, &mut out).is_err() && set.read(0, 1, &mut out).is_err());
}

#[test]
fn what_does_not_fit_together_is_an_error() {
    let folder = tempdir().unwrap();
    let a = npy(folder.path(), "a.npy", "|u1", "(4, 2)", &[0; 8]);
    let b = npy(folder.path(), "b.npy", "<f4", "(3,)", &[0; 12]);
    let error = RecordSet::open(&[&a, &b]).unwrap_err().to_string();
    assert!(
        error.contains("b.npy: expected 4 records, as ") && error.contains("a.npy has, found 3"),
        "{error}"
    );
    for (descr, shape, data, expected) in [
        (
            ">f4",
            "(2,)",
            8,
            "descr @ 20: expected a number in little-endian order, such as '<f4', found '>f4'",
        ),
        ("|O", "(1,)", 8, "found '|O', Python objects"),
        ("<U3", "(1,)", 12, "found '<U3'"),
        ("<f4", "()", 4, "the shape @ 60: expected at least one axis, found ()"),
        ("<f4", "(3,)", 8, "expected a file of "),
    ] {
        let path = npy(folder.path(), "bad.npy", descr, shape, &vec![0; data]);
        match RecordSet::open(&[&path]) {
            Err(Error::BadHeader { field, offset, expected: wanted, found, .. }) => {
                let text = format!("{field} @ {offset}: expected {wanted}, found {found}");
                assert!(text.contains(expected), "{text}");
            }
            other => panic!("{descr} {shape}: {other:?}"),
        }
    }
    assert!(matches!(RecordSet::open(&[] as &[&Path]), Err(Error::NoShards { .. })));
    let none = npy(folder.path(), "none.npy", "|u1", "(0, 2)", &[]);
    assert!(matches!(RecordSet::open(&[none]), Err(Error::Empty { .. })));
    let set = RecordSet::open(&[&a]).unwrap();
    for fraction in [-0.1, 1.0, 0.99, f64::NAN] {
        assert!(set.split(fraction, 1).is_err(), "{fraction}");
    }
    let options = RecordOptions { batch: 5, ..RecordOptions::default() };
    let error = RecordLoader::new(&set, options, 0).err().unwrap().to_string();
    assert!(error.contains("at most 4 records, found 5"), "{error}");
    assert!(RecordLoader::new(&set, RecordOptions { batch: 0, ..options }, 0).is_err());
}

#[test]
fn a_file_cut_short_while_in_use_is_an_error_that_stays() {
    let (folder, set) = set(100);
    let mut loader =
        RecordLoader::new(&set, RecordOptions { batch: 10, ahead: 1, ..RecordOptions::default() }, 0)
            .unwrap();
    loader.next().unwrap();
    let file = fs::File::options().write(true).open(folder.path().join("images.npy")).unwrap();
    file.set_len(200).unwrap();
    let error = (0..20).find_map(|_| loader.next().err()).unwrap().to_string();
    assert!(error.contains("images.npy: "), "{error}");
    assert_eq!(loader.next().unwrap_err().to_string(), error);
}
