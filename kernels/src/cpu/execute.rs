//! Interim dispatch, replaced as soon as the kernel families land: moves bytes only.

use super::threads::Threads;
use crate::{Op, memory::Memory};

/// # Safety
/// Nobody else touches what the op writes, nor writes what it reads, while this runs.
pub(crate) unsafe fn execute(op: &Op, memory: &Memory, _threads: &Threads) -> Result<(), String> {
    // SAFETY: the caller's contract, for each operand; `Op::check` has ruled out overlap.
    unsafe {
        match op {
            Op::Fill { out, value } => memory.write::<f32>(out).fill(*value),
            Op::Copy { input, out } => memory.write_bytes(out).copy_from_slice(memory.read_bytes(input)),
            Op::CopyOut { input, out } => out.op_bytes_mut().copy_from_slice(memory.read_bytes(input)),
            Op::CopyIn { input, out } => memory.write_bytes(out).copy_from_slice(input.op_bytes()),
            Op::Add { input, out } => {
                for (o, i) in memory.write::<f32>(out).iter_mut().zip(memory.read::<f32>(input)) {
                    *o += i;
                }
            }
            _ => return Err("no kernel".to_string()),
        }
    }
    Ok(())
}
