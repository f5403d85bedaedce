//! A policy of one's own, in ten lines.
//!
//! ```text
//! cargo run --release --example custom_policy
//! ```

use ebbtide::{
    engine::{
        Result,
        gpt2::Gpt2Config,
        plan::{StepShape, plan_with},
    },
    kernels::bytes,
    offload::{Activation, Codec, OffloadOptions, Placement, Policy, Role, SegmentPlan, Tier, policy},
};

/// The first blocks are recomputed; of the others what attention needs is sent out, and the rest stays in half the bytes.
struct Mine;

impl Policy for Mine {
    fn activation(&self, activation: &Activation<'_>) -> Placement {
        match activation.role {
            Role::Attention => Placement::Offload(Tier::Host, Codec::Raw),
            Role::NormOutput | Role::GeluOutput => Placement::Rerun,
            _ => Placement::Keep(Codec::BF16),
        }
    }
    fn segment(&self, name: &str) -> SegmentPlan {
        if matches!(name, "h.0" | "h.1" | "h.2") { SegmentPlan::Recompute } else { SegmentPlan::Run }
    }
}

fn main() -> Result<()> {
    // What it would need is known without running it.
    let shape = StepShape {
        model: Gpt2Config::named("gpt2")?,
        batch: 8,
        context: 1024,
        accumulate: 1,
        offload_optimizer: false,
        numerics: Default::default(),
    };
    let policies: [(&str, Box<dyn Policy>); 2] =
        [("mine", Box::new(Mine)), ("keep", Box::new(policy::KeepAll))];
    for (name, policy) in policies {
        let planned = plan_with(&shape, policy, &OffloadOptions::default(), None)?;
        println!(
            "{name}: at most {} on the device, {} in host memory",
            bytes(planned.memory.peak_bytes),
            bytes(planned.host_bytes)
        );
    }
    Ok(())
}
