//! The runtime alone, in virtual time: a chain of layers as large as a 70B model's, whose inputs are offloaded.

use ebbtide_kernels::{
    Category, DType, Device, Op, Rates, Slice, Stream,
    op::{Gemm, Layout},
};
use ebbtide_offload::{
    Activation, Codec, Offload, OffloadOptions, OffloadReport, Placement, Role, Tier, TransferTimes,
};

/// Layers, width, and hidden width of a 70B model (Touvron and others, Llama 2, 2023: 80, 8192, 28672); tokens of a step.
const LAYERS: usize = 80;
const WIDTH: usize = 8192;
const HIDDEN: usize = 28672;
const TOKENS: usize = 4096;
/// Products of a layer, as one of `WIDTH` by this: q and out, k and v of an eighth, and three of the hidden width.
const COLUMNS: usize = 2 * WIDTH + WIDTH / 4 + 3 * HIDDEN;
const INPUT_BYTES: u64 = (TOKENS * WIDTH * 2) as u64;

struct Chain {
    device: Device,
    compute: Stream,
    offload: Offload,
    weight: Slice,
}

/// One step: the seconds that it took, what moved, and where the time went.
struct Step {
    seconds: f64,
    report: OffloadReport,
    times: TransferTimes,
}

impl Chain {
    fn new(rates: Rates, budget_bytes: Option<usize>) -> Self {
        let device = Device::timed(rates, budget_bytes);
        let compute = device.stream("compute");
        let policy = |_: &Activation<'_>| Placement::Offload(Tier::Host, Codec::Raw);
        let offload = Offload::new(&compute, Box::new(policy), OffloadOptions::default()).unwrap();
        // All layers' in turn: a chain's weights would come from elsewhere.
        let weight = device.alloc(WIDTH * COLUMNS, DType::BF16, Category::Weights, "weight").unwrap();
        Chain { device, compute, offload, weight }
    }

    fn alloc(&self, columns: usize, name: &str) -> Slice {
        self.offload.alloc(TOKENS * columns, DType::BF16, Category::Activations, name).unwrap()
    }

    /// A product with the weight: there, or back.
    fn product(&self, a: &Slice, out: Slice, back: bool) {
        let (n, k) = if back { (WIDTH, COLUMNS) } else { (COLUMNS, WIDTH) };
        let gemm = Gemm {
            a: a.clone(),
            a_layout: Layout::Normal,
            b: self.weight.clone(),
            b_layout: if back { Layout::Transposed } else { Layout::Normal },
            bias: None,
            out,
            accumulate: false,
            m: TOKENS,
            n,
            k,
        };
        self.compute.submit(Op::Gemm(gemm)).unwrap();
    }

    fn step(&self, number: u32) -> Step {
        let clock = || self.device.virtual_time().unwrap().0;
        let (start, before) = (clock(), self.offload.times());
        self.offload.take_report();
        self.offload.begin_forward(number);
        let (mut x, mut saved) = (self.alloc(WIDTH, "input"), Vec::new());
        self.compute.submit(Op::Fill { out: x.clone(), value: 0.0 }).unwrap();
        for layer in 0..LAYERS {
            let (shape, dtype) = (&[TOKENS, WIDTH], DType::BF16);
            let name = &format!("h.{layer}/input");
            let role = Role::Activation;
            let activation = Activation { name, shape, dtype, role, segment: None, rerun: false };
            saved.push(self.offload.save(x.clone(), &activation).unwrap());
            let inside = self.alloc(COLUMNS, "inside");
            self.product(&x, inside.clone(), false);
            x = self.alloc(WIDTH, "output");
            // What makes it the width's again costs no product here.
            let first = inside.part(0..TOKENS * WIDTH).unwrap();
            self.compute.submit(Op::Copy { input: first, out: x.clone() }).unwrap();
        }
        self.offload.begin_backward();
        for saved in saved.into_iter().rev() {
            let input = self.offload.load(&saved).unwrap();
            drop(saved);
            // Again, then the gradients of the input and of the weight, each a product as large.
            let inside = self.alloc(COLUMNS, "inside");
            self.product(&input, inside.clone(), false);
            self.product(&inside, self.alloc(WIDTH, "gradient"), true);
            self.product(&inside, self.alloc(WIDTH, "weight's"), true);
        }
        self.device.synchronize().unwrap();
        let (seconds, report) = (clock() - start, self.offload.report());
        Step { seconds, report, times: self.offload.times().since(&before) }
    }

    /// The second step: the first shows how much there is.
    fn second(&self) -> Step {
        self.step(0);
        self.step(1)
    }
}

fn h200() -> Rates {
    Rates::named("h200").unwrap()
}

/// Seconds of a step's products on a card.
fn floor_seconds(rates: &Rates) -> f64 {
    4.0 * LAYERS as f64 * 2.0 * (TOKENS * WIDTH * COLUMNS) as f64 / rates.half_flops
}

#[test]
fn a_layers_input_leaves_and_comes_back_beside_its_products() {
    let step = Chain::new(h200(), None).second();
    assert!(step.report.out_bytes() >= (LAYERS as u64 - 8) * INPUT_BYTES, "{:?}", step.report);
    assert_eq!(step.report.out_bytes(), step.report.in_bytes());
    assert!(step.times.transfer_seconds > 0.1, "{:?}", step.times);
    assert!(step.times.exposed_seconds < 0.001 * step.seconds, "{:?}", step.times);
    let ratio = step.seconds / floor_seconds(&h200());
    assert!((1.0..1.05).contains(&ratio), "{ratio}");
}

/// What has left makes room in time: the step needs less than half of what it would with all inputs kept, and with no more than that
/// as its budget it is as fast.
#[test]
fn what_has_left_makes_room_in_time() {
    let free = Chain::new(h200(), None);
    let (fast, peak) = (free.second(), free.device.memory().extent_bytes);
    let kept = 2 * (WIDTH + TOKENS) * COLUMNS + LAYERS * INPUT_BYTES as usize;
    assert!(peak < kept / 2, "{peak} {kept}");
    let tight = Chain::new(h200(), Some(peak)).second();
    assert!(tight.seconds < 1.02 * fast.seconds, "{} {}: {:?}", tight.seconds, fast.seconds, tight.times);
}

/// A tenth of the rate at which products need a link is ten times the time.
#[test]
fn a_link_that_is_too_slow_is_what_a_step_takes() {
    let rates = h200();
    let per_layer = floor_seconds(&rates) / 4.0 / LAYERS as f64;
    let enough = INPUT_BYTES as f64 / per_layer;
    for (share, hidden) in [(4.0, true), (0.1, false)] {
        let rates = Rates { out_bytes: share * enough, in_bytes: share * enough, ..rates.clone() };
        let step = Chain::new(rates.clone(), None).second();
        let link_seconds = step.report.out_bytes() as f64 / rates.out_bytes;
        if hidden {
            assert!(step.times.exposed_seconds < 0.01 * step.seconds, "{:?}", step.times);
        } else {
            assert!(step.seconds > link_seconds, "{} {link_seconds}", step.seconds);
            assert!(step.times.exposed_seconds > 0.5 * step.seconds, "{:?}", step.times);
        }
    }
}
