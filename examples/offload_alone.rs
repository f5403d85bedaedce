//! The offload library without the engine: a framework of one's own saves what its forward pass makes, and loads it in its
//! backward pass.
//!
//! ```text
//! cargo run --example offload_alone
//! ```

use ebbtide::{
    kernels::{Category, DType, Device, Op, bytes},
    offload::{Activation, Codec, Offload, OffloadOptions, Placement, Policy, Role, SegmentPlan},
};

/// A policy of one's own: what is large goes to the host.
struct LargeOut;

impl Policy for LargeOut {
    fn activation(&self, activation: &Activation<'_>) -> Placement {
        match activation.shape.iter().product::<usize>() {
            1_000_000.. => Placement::Offload(Codec::Raw),
            _ => Placement::Keep(Codec::Raw),
        }
    }
    fn segment(&self, _name: &str) -> SegmentPlan {
        SegmentPlan::Run
    }
}

fn main() -> ebbtide::kernels::Result<()> {
    const LAYERS: usize = 8;
    const SIZE: usize = 1 << 20;
    let device = Device::cpu()?;
    let compute = device.stream("compute");
    let options = OffloadOptions { in_flight_bytes: 8 << 20, prefetch_bytes: 8 << 20, ..Default::default() };
    let offload = Offload::new(&compute, Box::new(LargeOut), options)?;

    offload.begin_forward(1);
    let mut saved = Vec::new();
    for layer in 0..LAYERS {
        let out = offload.alloc(SIZE, DType::F32, Category::Activations, "activation")?;
        compute.submit(Op::Fill { out: out.clone(), value: layer as f32 })?;
        let name = format!("layer{layer}");
        let activation =
            Activation { name: &name, shape: &[SIZE], role: Role::Activation, segment: None, rerun: false };
        // From here on its device memory is the runtime's to give away.
        saved.push(offload.save(out, &activation)?);
    }

    offload.begin_backward();
    // What has been used is dropped, and its memory is free again.
    while let Some(last) = saved.pop() {
        let layer = saved.len();
        let activation = offload.load(&last)?;
        assert_eq!(compute.download::<f32>(&activation)?[SIZE - 1], layer as f32);
    }
    let (report, memory) = (offload.report(), device.memory());
    println!("saved {} in {LAYERS} slices", bytes(report.saved_bytes as usize));
    println!(
        "sent out {}, brought back {}",
        bytes(report.out_bytes as usize),
        bytes(report.in_bytes as usize)
    );
    println!("on the device at most {}", bytes(memory.peak_bytes));
    Ok(())
}
