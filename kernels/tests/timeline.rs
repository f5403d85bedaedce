//! Virtual time, held against figures worked out by hand.

use ebbtide_kernels::{Category, DType, Device, Link, Op, Rates, Slice, SpillOptions, Stream};

/// A byte a second everywhere, and no time for what is not the op's own.
fn unit() -> Rates {
    Rates {
        name: "unit".to_string(),
        memory_bytes: 1.0,
        f32_flops: 1.0,
        half_flops: 2.0,
        out_bytes: 1.0,
        in_bytes: 1.0,
        disk_write_bytes: 1.0,
        disk_read_bytes: 2.0,
        launch_seconds: 0.0,
        kernel_seconds: 0.0,
    }
}

struct Bench {
    device: Device,
    compute: Stream,
    out: Stream,
    back: Stream,
}

impl Bench {
    fn new(rates: Rates) -> Self {
        let device = Device::timed(rates, None);
        let [compute, out, back] = ["compute", "out", "back"].map(|name| device.stream(name));
        Bench { device, compute, out, back }
    }

    fn alloc(&self, bytes: usize) -> Slice {
        self.device.alloc(bytes, DType::U8, Category::Workspace, "x").unwrap()
    }

    /// Takes as many seconds as the slice has bytes.
    fn fill(&self, out: &Slice) {
        self.compute.submit(Op::Fill { out: out.clone(), value: 0.0 }).unwrap();
    }

    fn seconds(&self) -> f64 {
        self.device.synchronize().unwrap();
        self.device.virtual_time().unwrap().0
    }
}

#[test]
fn a_stream_runs_its_ops_in_order_and_streams_run_beside_each_other() {
    let bench = Bench::new(unit());
    let (x, y) = (bench.alloc(100), bench.alloc(300));
    let host = bench.device.host_buffer(100, "host").unwrap();
    bench.fill(&x);
    // From 100 to 200, while what does not touch it runs from 100 to 400.
    bench.out.submit(Op::CopyOut { input: x.clone(), out: host.all() }).unwrap();
    bench.fill(&y);
    assert_eq!(bench.device.virtual_time(), Some((0.0, 3)));
    assert_eq!(bench.seconds(), 400.0);
    let reports = bench.device.streams();
    assert_eq!(reports.iter().map(|report| report.busy_seconds).collect::<Vec<_>>(), [400.0, 100.0, 0.0]);
    assert_eq!(reports[1].wait_seconds_on["compute"], 100.0);
}

#[test]
fn who_overwrites_waits_for_the_copy_and_is_charged_with_it() {
    let bench = Bench::new(Rates { out_bytes: 0.5, ..unit() });
    let x = bench.alloc(100);
    let host = bench.device.host_buffer(100, "host").unwrap();
    bench.fill(&x);
    bench.out.submit(Op::CopyOut { input: x.clone(), out: host.all() }).unwrap();
    bench.fill(&x);
    // 100, then 200 of copying, then 100.
    assert_eq!(bench.seconds(), 400.0);
    assert_eq!(bench.compute.report().wait_seconds_on["out"], 200.0);
    assert_eq!(bench.compute.report().wait_seconds, 200.0);
}

#[test]
fn both_directions_at_once_but_one_copy_a_direction() {
    let bench = Bench::new(unit());
    let host = bench.device.host_buffer(400, "host").unwrap();
    let part = |i: usize| host.part(100 * i..100 * (i + 1)).unwrap();
    let other = bench.device.stream("other");
    // Kept: memory that is handed on is ordered too.
    let slices = [0; 4].map(|_| bench.alloc(100));
    bench.out.submit(Op::CopyOut { input: slices[0].clone(), out: part(0) }).unwrap();
    bench.back.submit(Op::CopyIn { input: part(1), out: slices[1].clone() }).unwrap();
    assert_eq!(bench.seconds(), 100.0);
    // On a stream of its own, and yet after the first that goes its way.
    bench.out.submit(Op::CopyOut { input: slices[2].clone(), out: part(2) }).unwrap();
    other.submit(Op::CopyOut { input: slices[3].clone(), out: part(3) }).unwrap();
    assert_eq!(bench.seconds(), 300.0);
}

/// An engine does not stand still for an op that is not ready while another is.
#[test]
fn what_is_ready_runs_first() {
    let bench = Bench::new(unit());
    let host = bench.device.host_buffer(200, "host").unwrap();
    let part = |i: usize| host.part(100 * i..100 * (i + 1)).unwrap();
    let (x, y) = (bench.alloc(100), bench.alloc(100));
    bench.fill(&x);
    bench.out.submit(Op::CopyOut { input: x, out: part(0) }).unwrap();
    bench.back.submit(Op::CopyOut { input: y, out: part(1) }).unwrap();
    bench.back.synchronize().unwrap();
    assert_eq!(bench.device.virtual_time().unwrap().0, 100.0);
    assert_eq!(bench.seconds(), 200.0);
}

#[test]
fn the_disk_and_the_hosts_own_time() {
    let rates = Rates { launch_seconds: 1000.0, ..unit() };
    let bench = Bench::new(rates);
    let host = bench.device.host_buffer(4096, "host").unwrap();
    let options = SpillOptions { folder: std::env::temp_dir(), bytes: 4096, verify: false };
    let file = bench.device.spill_file(&options).unwrap().part(0..4096).unwrap();
    bench.out.submit(Op::WriteFile { input: host.all(), file: file.clone() }).unwrap();
    // Written from 1000 to 5096, read in half the time.
    bench.back.submit(Op::ReadFile { file, out: host.all() }).unwrap();
    assert_eq!(bench.seconds(), 5096.0 + 2048.0);
    // The host is as late as that; a launch more comes after.
    bench.fill(&bench.alloc(1));
    assert_eq!(bench.seconds(), 5096.0 + 2048.0 + 1000.0 + 1.0);
    assert_eq!(bench.device.virtual_time().unwrap().1, 3);
}

#[test]
fn a_product_takes_its_operations_or_its_bytes() {
    use ebbtide_kernels::op::{Gemm, Layout};
    for (dtype, seconds) in [(DType::F32, 2.0 * 1000.0), (DType::F16, 1000.0)] {
        let bench = Bench::new(Rates { memory_bytes: 1e9, ..unit() });
        let alloc = || bench.device.alloc(100, dtype, Category::Workspace, "x").unwrap();
        let (a, b, out) = (alloc(), alloc(), alloc());
        let (a_layout, b_layout) = (Layout::Normal, Layout::Normal);
        let (m, n, k) = (10, 10, 10);
        let gemm = Gemm { a, a_layout, b, b_layout, bias: None, out, accumulate: false, m, n, k };
        bench.compute.submit(Op::Gemm(gemm)).unwrap();
        assert_eq!(bench.seconds(), seconds, "{dtype}");
    }
}

#[test]
fn cards_have_rates_by_name() {
    for name in Rates::NAMES {
        let rates = Rates::named(name).unwrap();
        assert_eq!(rates.name, name);
        assert!(rates.half_flops > rates.f32_flops && rates.memory_bytes > rates.out_bytes);
    }
    assert_eq!(Rates::named("abacus"), None);
}

/// As on the backend itself.
#[test]
fn what_no_kernel_does_is_refused() {
    use ebbtide_kernels::{
        Error,
        op::{Attention, AttentionShape},
    };
    let bench = Bench::new(unit());
    let floats = |len| bench.device.alloc(len, DType::F32, Category::Workspace, "x").unwrap();
    let shape = AttentionShape { batch: 1, context: 2, heads: 1, head_size: 129, scale: 1.0 };
    let (qkv, out, lse) = (floats(2 * 3 * 129), floats(2 * 129), floats(2));
    let attention = Attention { qkv, out, lse, shape, dropout: None };
    let refused = bench.compute.submit(Op::Attention(attention));
    assert!(matches!(refused, Err(Error::BadConstant { .. })), "{refused:?}");
}

#[test]
fn a_card_is_known_by_its_drivers_name_and_keeps_its_peaks_under_a_measured_link() {
    let named =
        ["NVIDIA H200", "NVIDIA A100-SXM4-80GB", "NVIDIA GeForce RTX 4090", "NVIDIA GeForce RTX 3090"];
    for (name, known) in named.iter().zip(Rates::NAMES) {
        assert_eq!(Rates::of_card(name), Rates::named(known));
    }
    assert_eq!(Rates::of_card("NVIDIA GeForce RTX 4090 Laptop GPU"), None);
    let link = Link { out_bytes: 5e9, in_bytes: 6e9, out_together_bytes: 3e9, in_together_bytes: 4e9 };
    let rates = Rates::named("h200").unwrap();
    let expected = Rates { out_bytes: 3e9, in_bytes: 4e9, ..rates.clone() };
    assert_eq!(rates.with_link(&link), expected);
}
