//! The offload library without the engine: a framework of one's own saves what its forward pass makes, and loads it in its
//! backward pass.
//!
//! ```text
//! cargo run --example offload_alone
//! ```

use ebbtide::{
    kernels::{Category, DType, Device, Op, bytes},
    offload::{Activation, Codec, DiskOptions, Offload, OffloadOptions, Placement, Role, Tier},
};

fn main() -> ebbtide::kernels::Result<()> {
    const LAYERS: usize = 8;
    const SIZE: usize = 1 << 20;
    let device = Device::cpu()?;
    let compute = device.stream("compute");
    // A policy is a function: what is large leaves the device, half of it as int8.
    let policy = |activation: &Activation<'_>| match activation.len() {
        1_000_000.. if activation.name.ends_with("even") => Placement::Offload(Tier::Host, Codec::INT8),
        1_000_000.. => Placement::Offload(Tier::Host, Codec::Raw),
        _ => Placement::Keep(Codec::Raw),
    };
    // Host memory for two slices; what it does not hold goes on to disk.
    let options = OffloadOptions {
        in_flight_bytes: 8 << 20,
        prefetch_bytes: 8 << 20,
        host_bytes: Some(9 << 20),
        disk: Some(DiskOptions::new(std::env::temp_dir(), 64 << 20)),
        ..OffloadOptions::default()
    };
    let offload = Offload::new(&compute, Box::new(policy), options)?;

    offload.begin_forward(1);
    let mut saved = Vec::new();
    for layer in 0..LAYERS {
        let out = offload.alloc(SIZE, DType::F32, Category::Activations, "activation")?;
        compute.submit(Op::Fill { out: out.clone(), value: 127.0 * layer as f32 })?;
        let name = format!("layer{layer}.{}", if layer % 2 == 0 { "even" } else { "odd" });
        let activation = Activation {
            name: &name,
            shape: &[SIZE],
            dtype: out.dtype(),
            role: Role::Activation,
            segment: None,
            rerun: false,
        };
        // From here on its device memory is the runtime's to give away.
        saved.push(offload.save(out, &activation)?);
    }

    offload.begin_backward();
    // What has been used is dropped, and its memory is free again.
    while let Some(last) = saved.pop() {
        let layer = saved.len();
        let activation = offload.load(&last)?;
        assert_eq!(compute.download::<f32>(&activation)?[SIZE - 1], 127.0 * layer as f32);
    }
    let report = offload.report();
    println!("saved {} in {LAYERS} slices", bytes(report.saved_bytes as usize));
    for (tier, codec, moved) in report.moved.iter().filter(|(.., moved)| moved.out_bytes > 0) {
        println!(
            "to the {tier} as {codec}: {}, back {}",
            bytes(moved.out_bytes as usize),
            bytes(moved.in_bytes as usize)
        );
    }
    println!("on the device at most {}", bytes(device.memory().peak_bytes));
    Ok(())
}
