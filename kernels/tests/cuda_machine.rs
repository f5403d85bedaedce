//! Machines on which the `cuda` backend cannot be used, played by a simulated driver: what is missing is said, and nothing is left open.
//!
//! In a process of its own, for the machine is everybody's; one test, for its machines take turns.

use ebbtide_kernels::{Category, CudaOptions, CudaUnavailable, DType, Device, Error, Op};
use ebbtide_simcuda::{Card, Simulator};
// Linked, so that it is built: the simulator loads it.
use ebbtide_simcublaslt as _;

const BUDGET: usize = 1 << 20;

fn unavailable(budget_bytes: Option<usize>) -> (CudaUnavailable, String) {
    let error = Device::cuda_with(CudaOptions { ordinal: 0, budget_bytes }).err().expect("it cannot be used");
    let text = error.to_string();
    match error {
        Error::Cuda { ordinal: 0, reason } => (reason, text),
        other => panic!("{other:?}"),
    }
}

#[test]
fn what_a_machine_lacks_is_said() {
    let simulator = Simulator::load_driver();
    let play = |card: Card| simulator.set_card(&card);

    play(Card { driver: 12_080, ..Card::default() });
    let (reason, text) = unavailable(None);
    assert_eq!(reason, CudaUnavailable::OldDriver { found: 12_080, needed: 13_000 });
    assert!(text.contains("12.8") && text.contains("13.0"), "{text}");

    play(Card { devices: 0, ..Card::default() });
    assert_eq!(unavailable(None).0, CudaUnavailable::NoDevice { count: 0 });

    for (capability, features) in [((7, 5), 2), ((7, 0), 3)] {
        play(Card { major: capability.0, minor: capability.1, ..Card::default() });
        match unavailable(None) {
            (CudaUnavailable::OldCard { name, capability: found, missing }, text) => {
                assert!(
                    name == "Simulated GPU" && found == capability && missing.len() == features,
                    "{text}"
                );
                assert!(missing.iter().all(|feature| text.contains(feature)), "{text}");
            }
            other => panic!("{other:?}"),
        }
    }

    play(Card::default());
    // Where the machine has NVIDIA's own, that is found.
    match Device::cuda_with(CudaOptions { ordinal: 0, budget_bytes: Some(BUDGET) }) {
        Ok(_) => {}
        Err(error) => {
            assert!(matches!(error, Error::Cuda { reason: CudaUnavailable::NoCublasLt, .. }), "{error:?}");
            assert!(error.to_string().contains("cublasLt"), "{error}");
        }
    }
    // Memory that someone else takes after the budget has been: a stream's scratch finds none.
    Simulator::load();
    play(Card { memory_bytes: BUDGET + (64 << 10), ..Card::default() });
    let device = Device::cuda_with(CudaOptions { ordinal: 1, budget_bytes: Some(BUDGET) }).unwrap();
    let stream = device.stream("compute");
    let out = device.alloc(100, DType::F32, Category::Workspace, "out").unwrap();
    stream.submit(Op::Fill { out, value: 1.0 }).unwrap();
    let error = device.synchronize().unwrap_err().to_string();
    for part in
        ["fill", "CUDA_ERROR_OUT_OF_MEMORY", "1.00 MiB wanted beside the budget of 1.00 MiB", "of 1.06 MiB"]
    {
        assert!(error.contains(part), "{part}: {error}");
    }
    drop((stream, device));
    assert_eq!([0, 1].map(|ordinal| simulator.findings(ordinal)), [const { Vec::<String>::new() }; 2]);
    // Whoever takes what there is runs on the CPU then.
    play(Card { driver: 12_080, ..Card::default() });
    assert_eq!(Device::best().unwrap().name(), "cpu");
}
