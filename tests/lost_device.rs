//! A card that is lost in the middle of a step, on a simulated driver: an error that says so, and the run goes on elsewhere from its last
//! checkpoint, bitwise as if nothing had happened.

mod common;

use common::{batch, bits, small, tiny_windows, trainer_in};
use ebbtide::{
    engine::{Batch, Numerics, Precision, Trainer, checkpoint},
    kernels::{CudaOptions, Device},
    offload::policy::Builtin,
};
// Linked, so that it is built: the simulator loads it.
use ebbtide_simcublaslt as _;
use ebbtide_simcuda::{Action, Rule, Simulator};
use ebbtide_simgpu::Order;
use serde_json::json;

const ECC_UNCORRECTABLE: u32 = 214;
const STEPS: u64 = 4;

fn trainer(ordinal: usize, policy: Builtin) -> Trainer {
    let device = Device::cuda_with(CudaOptions { ordinal, budget_bytes: Some(16 << 20) }).unwrap();
    let numerics = Numerics { precision: Precision::F16, residual_f32: false };
    trainer_in(&device, policy.policy(), tiny_windows(), small(0.1), numerics).unwrap()
}

fn windows() -> Vec<Vec<Batch>> {
    (0..STEPS).map(|step| vec![batch(&small(0.1), 2, 8, step)]).collect()
}

#[test]
fn a_device_lost_in_mid_step_costs_no_more_than_the_step() {
    let simulator = Simulator::load();
    let windows = windows();
    let expected = bits(&mut trainer(0, Builtin::Offload), &windows).unwrap();
    let folder = tempfile::tempdir().unwrap();
    // Calls of all kinds.
    for (number, call) in
        ["cuLaunchKernel", "cublasLtMatmul", "cuMemcpyDtoHAsync_v2", "cuEventRecord", "cuEventQuery"]
            .into_iter()
            .enumerate()
    {
        let (ordinal, folder) = (1 + number, folder.path().join(call));
        simulator.reset(ordinal, Order::Random(number as u64));
        let mut lost = trainer(ordinal, Builtin::Offload);
        lost.step(&windows[0]).unwrap();
        let before = simulator.calls(ordinal, call);
        lost.step(&windows[1]).unwrap();
        let of_a_step = simulator.calls(ordinal, call) - before;
        let saved = checkpoint::save(&lost, &folder, json!({}), 0).unwrap();
        // In the middle: a step makes a few calls more or fewer than the one before.
        let rule = Rule {
            call: call.to_string(),
            skip: simulator.calls(ordinal, call) + of_a_step / 2,
            count: 1,
            action: Action::Break(ECC_UNCORRECTABLE),
        };
        simulator.rule(ordinal, &rule);
        let error = match lost.step(&windows[2]) {
            Err(error) => error.to_string(),
            Ok(_) => panic!("{call}: {} calls, {rule:?}", simulator.calls(ordinal, call)),
        };
        // cuBLASLt has no code of its own for it.
        let said = match call {
            "cublasLtMatmul" => "CUBLAS_STATUS_EXECUTION_FAILED",
            _ => "CUDA_ERROR_ECC_UNCORRECTABLE (214)",
        };
        assert!(error.contains(said), "{call}: {error}");
        assert_eq!(lost.steps_done(), 2);
        // Neither is there a second checkpoint of it, nor is the first touched.
        let again = lost.step(&windows[2]).unwrap_err().to_string();
        assert!(again.contains("CUDA_ERROR_ECC_UNCORRECTABLE (214)"), "{call}: {again}");
        let other = folder.join("other");
        checkpoint::save(&lost, &other, json!({}), 0).unwrap_err();
        assert!(checkpoint::latest(&other).unwrap().is_none());
        drop(lost);
        let mut resumed = trainer(ordinal + 100, Builtin::Keep);
        checkpoint::load(&mut resumed, &saved).unwrap();
        let found = bits(&mut resumed, &windows[2..]).unwrap();
        assert_eq!(found[0], expected[0][4..], "{call}: losses and norms");
        assert_eq!(found[1..], expected[1..], "{call}: gradients and weights");
    }
}
