//! Steps far larger than any test machine, in virtual time: what overlaps, and what a policy costs.

use ebbtide::{
    engine::{
        Numerics, Precision,
        gpt2::Gpt2Config,
        plan::{StepPlan, StepShape, StepTime, least_budget, sized, timed},
    },
    kernels::Rates,
    offload::{Expression, OffloadOptions},
};

fn h200() -> Rates {
    Rates::named("h200").unwrap()
}

fn shape(model: &str, batch: usize) -> StepShape {
    StepShape {
        model: Gpt2Config::named(model).unwrap(),
        batch,
        context: 1024,
        accumulate: 1,
        offload_optimizer: false,
        numerics: Numerics { precision: Precision::BF16, residual_f32: false },
    }
}

fn run(shape: &StepShape, policy: &str, rates: &Rates, budget_bytes: Option<usize>) -> (StepPlan, StepTime) {
    let policy: Expression = policy.parse().unwrap();
    let options = sized(shape, policy.clone(), &OffloadOptions::default(), budget_bytes).unwrap();
    timed(shape, policy, &options, budget_bytes, rates).unwrap()
}

const BOUNDARIES: &str = "recompute, h.*/input: offload";

/// GPT-2 1.5B, 8 sequences: the step is its roofline, a recomputed one has another forward pass, and boundaries leave and come back
/// beside it.
#[test]
fn boundaries_of_gpt2_xl_are_hidden() {
    let (shape, rates) = (shape("gpt2-xl", 8), h200());
    let (planned, keep) = run(&shape, "keep", &rates, None);
    let floor_seconds = planned.flops as f64 / rates.half_flops;
    assert!((1.0..1.6).contains(&(keep.seconds / floor_seconds)), "{keep:?}, products alone {floor_seconds}");
    assert!((1.0..1.001).contains(&(keep.seconds / keep.compute_seconds)) && keep.exposed_seconds == 0.0);
    let (_, recompute) = run(&shape, "recompute", &rates, None);
    assert!((1.2..1.34).contains(&(recompute.seconds / keep.seconds)), "{recompute:?} {keep:?}");
    let (planned, boundaries) = run(&shape, BOUNDARIES, &rates, None);
    // The last 3 of 48 are wanted at once.
    let sent_bytes = 45 * 8 * 1024 * 1600 * 2u64;
    assert_eq!((planned.offload.out_bytes(), planned.offload.in_bytes()), (sent_bytes, sent_bytes));
    let link_seconds = 2.0 * sent_bytes as f64 / rates.out_bytes;
    assert!((boundaries.transfer_seconds / link_seconds - 1.0).abs() < 1e-6, "{boundaries:?} {link_seconds}");
    assert!(boundaries.exposed_seconds < 0.02 * boundaries.seconds, "{boundaries:?}");
    assert!(boundaries.seconds < 1.02 * recompute.seconds, "{boundaries:?} {recompute:?}");
}

/// Boundaries of 48 MiB are hidden as long as some may be on their way; one at a time they are not.
#[test]
fn boundaries_of_gpt2_are_hidden_by_a_window_of_slices() {
    let (shape, policy) = (shape("gpt2", 32), BOUNDARIES.parse::<Expression>().unwrap());
    let waits = |window_slices| {
        let options = OffloadOptions { window_slices, ..OffloadOptions::default() };
        let (_, time) = timed(&shape, policy.clone(), &options, None, &h200()).unwrap();
        time.exposed_seconds / time.seconds
    };
    let found = [waits(0), waits(OffloadOptions::default().window_slices)];
    assert!(found[0] > 0.2 && found[1] < 0.02, "{found:?}");
}

/// A link too slow for them: the step is as long as the link needs, and the account says by how much it stood still.
#[test]
fn a_slow_link_shows() {
    let shape = shape("gpt2-xl", 8);
    let rates = Rates { out_bytes: 5e9, in_bytes: 5e9, ..h200() };
    let (planned, time) = run(&shape, BOUNDARIES, &rates, None);
    let out_seconds = planned.offload.out_bytes() as f64 / rates.out_bytes;
    // Out beside in, but what comes back last went out first.
    assert!(time.seconds > 1.5 * out_seconds && time.seconds < 2.5 * out_seconds, "{time:?} {out_seconds}");
    let stood_still = time.seconds - time.compute_seconds;
    assert!((time.exposed_seconds / stood_still - 1.0).abs() < 0.01, "{time:?}");
}

/// Everything offloaded is more than a link carries beside the step; in half the bytes it takes half as long.
#[test]
fn what_the_link_carries_bounds_a_step_that_offloads_all() {
    let (shape, rates) = (shape("gpt2-xl", 8), h200());
    let (planned, all) = run(&shape, "offload", &rates, None);
    let out_seconds = planned.offload.out_bytes() as f64 / rates.out_bytes;
    assert!(all.seconds > 1.5 * out_seconds && all.exposed_seconds > 0.5 * all.seconds, "{all:?}");
    let (halved, int8) = run(&shape, "offload int8", &rates, None);
    let share = halved.offload.out_bytes() as f64 / planned.offload.out_bytes() as f64;
    assert!((0.5..0.55).contains(&share), "{share}");
    let exposed = int8.exposed_seconds / all.exposed_seconds;
    assert!(exposed < 0.6, "{int8:?} {all:?}");
}

/// A budget changes when things move. It is kept, and what the step pays for it is waiting, all of which is accounted for.
#[test]
fn a_budget_costs_waiting() {
    let (shape, rates) = (shape("gpt2-medium", 8), h200());
    let policy: Expression = "offload".parse().unwrap();
    let least = least_budget(&shape, policy, &OffloadOptions::default()).unwrap();
    let (_, free) = run(&shape, "offload", &rates, None);
    let (planned, tight) = run(&shape, "offload", &rates, Some(least));
    assert!(planned.memory.extent_bytes <= least);
    assert!(tight.seconds > 0.95 * free.seconds && tight.compute_seconds == free.compute_seconds);
    let stood_still = tight.seconds - tight.compute_seconds;
    assert!((tight.exposed_seconds / stood_still - 1.0).abs() < 0.02, "{tight:?} {free:?}");
}

/// The host queues a step's launches faster than an H200 runs them, but for models that are too small for it.
#[test]
fn launches_bound_a_step_of_next_to_nothing() {
    let model = Gpt2Config {
        width: 96,
        layers: 12,
        heads: 12,
        vocabulary: 512,
        ..Gpt2Config::named("gpt2").unwrap()
    };
    let time = |batch| run(&StepShape { model, ..shape("gpt2", batch) }, "keep", &h200(), None).1;
    let host_seconds = |time: &StepTime| time.launches as f64 * h200().launch_seconds;
    let (small, large) = (time(1), time(1024));
    assert!(small.seconds < 1.1 * host_seconds(&small), "{small:?}");
    assert!(large.seconds > 3.0 * host_seconds(&large), "{large:?}");
}
