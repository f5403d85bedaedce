//! What can go wrong in the device layer.

use std::{fmt, path::PathBuf};

/// Result of the device layer.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// An error of the device layer. Fields hold the facts; the message names them all.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum Error {
    /// The budget cannot hold an allocation.
    #[error("{0}")]
    OutOfMemory(OutOfMemory),
    /// An operand's length or dtype does not fit the op's shape.
    #[error("{op}: operand `{operand}` should be {expected}, is {found}")]
    BadOperand {
        /// The op.
        op: String,
        /// The operand's field name.
        operand: &'static str,
        /// Length and dtype that the shape asks for.
        expected: String,
        /// Length and dtype given.
        found: String,
    },
    /// A constant of an op is out of range.
    #[error("{op}: expected {expected}, found {found}")]
    BadConstant {
        /// The op.
        op: String,
        /// What would be right.
        expected: String,
        /// What was given.
        found: String,
    },
    /// Two operands share bytes, and one of them is written.
    #[error("{op}: operands `{first}` and `{second}` overlap")]
    Overlap {
        /// The op.
        op: String,
        /// An operand.
        first: &'static str,
        /// The other.
        second: &'static str,
    },
    /// A part of a slice or host buffer lies outside of it.
    #[error("{what} {start}..{end} lies outside of its {len}")]
    OutOfBounds {
        /// The unit: "elements" or "bytes".
        what: &'static str,
        /// First.
        start: usize,
        /// One past the last.
        end: usize,
        /// What there is.
        len: usize,
    },
    /// An op would write bytes that are saved for a later read: see [`crate::Slice::protect`].
    #[error("{op}: operand `{operand}` would overwrite `{saved}`, which is saved and may be loaded yet")]
    Protected {
        /// The op.
        op: String,
        /// The operand's field name.
        operand: &'static str,
        /// What the bytes were protected as.
        saved: String,
    },
    /// Operands of one op belong to different devices.
    #[error("{op}: operand `{operand}` belongs to another device")]
    OtherDevice {
        /// The op.
        op: String,
        /// The operand's field name.
        operand: &'static str,
    },
    /// A host buffer was submitted to an op while the host was reading or writing it.
    #[error("host buffer `{name}` is in use by the host")]
    HostBusy {
        /// The buffer's name.
        name: String,
    },
    /// A computation failed while it ran: an index out of range, or an injected fault. Ops after it were skipped.
    #[error("{op} failed: {message}")]
    OpFailed {
        /// The op.
        op: String,
        /// Why.
        message: String,
    },
    /// Both ends of a part of a file must be multiples of an alignment.
    #[error("bytes {start}..{end} of a file: both ends must be multiples of {alignment}")]
    Unaligned {
        /// First.
        start: usize,
        /// One past the last.
        end: usize,
        /// What they must be multiples of.
        alignment: usize,
    },
    /// The system has no memory for a host buffer, or does not let more be locked.
    #[error("no host memory for `{name}`: {} wanted, {reason}", crate::bytes(*bytes))]
    HostMemory {
        /// The buffer's name.
        name: String,
        /// Its bytes.
        bytes: usize,
        /// What there is instead, and what may help.
        reason: String,
    },
    /// The disk does not give what was asked of it.
    #[error("no room for {what} in {}: {message}", folder.display())]
    Disk {
        /// What was wanted.
        what: String,
        /// The folder.
        folder: PathBuf,
        /// The system's reason.
        message: String,
    },
    /// A CUDA device cannot be used.
    #[error("CUDA device {ordinal} cannot be used: {reason}")]
    Cuda {
        /// The device's number.
        ordinal: usize,
        /// Why, and what would help.
        reason: CudaUnavailable,
    },
    /// The CUDA driver, or a library of it, failed. After what it calls a sticky error the device is lost to this process.
    #[error("{doing}: {call} failed: {error}")]
    Driver {
        /// What was being done.
        doing: String,
        /// The function that said so.
        call: &'static str,
        /// Its name for the error.
        error: String,
    },
    /// The system could not give what the device needs at start.
    #[error("cannot start the device: {0}")]
    Start(String),
    /// The simulated device saw an access that nothing orders, or a read of bytes never written.
    #[error("simulation: {0}")]
    Violation(String),
}

/// Why a CUDA device cannot be used.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum CudaUnavailable {
    /// There is no driver.
    #[error(
        "no NVIDIA driver was found: looked for libcuda.so (nvcuda.dll on Windows) where the system looks for libraries; \
         install the driver of the card, 580 or newer"
    )]
    NoDriver,
    /// The driver does not start.
    #[error("the NVIDIA driver does not start: cuInit says {error}")]
    Start {
        /// Its name for the error.
        error: String,
    },
    /// The driver is too old for the kernels' code.
    #[error(
        "its driver is of CUDA {}.{}, and {}.{} or newer is needed: install the NVIDIA driver 580 or newer",
        found / 1000, found % 1000 / 10, needed / 1000, needed % 1000 / 10
    )]
    OldDriver {
        /// The driver's version, 1000 · major + 10 · minor.
        found: usize,
        /// The oldest that will do.
        needed: usize,
    },
    /// There is no such device.
    #[error("the driver has {count} devices, numbered from 0")]
    NoDevice {
        /// Devices that there are.
        count: usize,
    },
    /// The card is too old.
    #[error(
        "{name} is of compute capability {}.{}, which lacks {}; 8.0 (Ampere) or newer is needed",
        capability.0, capability.1, missing.join(", ")
    )]
    OldCard {
        /// The card's name.
        name: String,
        /// Major and minor.
        capability: (i32, i32),
        /// Features that the kernels need and it does not have.
        missing: Vec<&'static str>,
    },
    /// There is no cuBLASLt.
    #[error(
        "cuBLASLt was not found: looked for libcublasLt.so.13 (cublasLt64_13.dll on Windows) where the system looks for libraries; \
         install CUDA 13's cuBLAS, of which `pip install nvidia-cublas` has a copy for LD_LIBRARY_PATH"
    )]
    NoCublasLt,
    /// The card's memory does not hold the budget.
    #[error(
        "a memory budget of {} is asked for, and of the {} of {name} the driver has {} free: others hold {}. A budget of {} would fit",
        bytes(*wanted), bytes(*total), bytes(*free), bytes(total.saturating_sub(*free)), bytes(*fitting)
    )]
    Memory {
        /// The card's name.
        name: String,
        /// The budget, in bytes.
        wanted: usize,
        /// Bytes that the driver has free.
        free: usize,
        /// Bytes of the card.
        total: usize,
        /// The largest budget that would have fitted.
        fitting: usize,
    },
}

/// The facts of an allocation that does not fit.
#[derive(Clone, Debug, PartialEq)]
pub struct OutOfMemory {
    /// Name of the allocation.
    pub name: String,
    /// Its bytes.
    pub bytes: usize,
    /// The budget in bytes.
    pub budget_bytes: usize,
    /// Bytes in use when it was asked for.
    pub in_use_bytes: usize,
    /// The largest contiguous free range.
    pub largest_free_bytes: usize,
    /// The largest consumers: name and bytes, largest first.
    pub largest: Vec<(String, usize)>,
}

impl fmt::Display for OutOfMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "out of device memory: `{}` needs {}, but of the budget of {} {} are in use and the largest free range is {}",
            self.name,
            bytes(self.bytes),
            bytes(self.budget_bytes),
            bytes(self.in_use_bytes),
            bytes(self.largest_free_bytes),
        )?;
        if !self.largest.is_empty() {
            write!(f, "; largest consumers:")?;
            for (i, (name, size)) in self.largest.iter().enumerate() {
                write!(f, "{} {name} {}", if i == 0 { "" } else { "," }, bytes(*size))?;
            }
        }
        Ok(())
    }
}

/// A byte count for people: exact below 10 KiB, else in KiB, MiB or GiB to three or four digits.
pub fn bytes(count: usize) -> String {
    in_units(count, f64::round)
}

/// As [`bytes`], never less than the count: what it says suffices.
pub fn bytes_up(count: usize) -> String {
    in_units(count, f64::ceil)
}

fn in_units(count: usize, round: fn(f64) -> f64) -> String {
    const UNITS: [(&str, f64); 3] =
        [("GiB", (1u64 << 30) as f64), ("MiB", (1u64 << 20) as f64), ("KiB", (1u64 << 10) as f64)];
    if count < 10 << 10 {
        return format!("{count} B");
    }
    let (unit, scale) = UNITS.into_iter().find(|(_, scale)| count as f64 >= *scale).unwrap_or(UNITS[2]);
    let value = count as f64 / scale;
    match value < 10.0 {
        true => format!("{:.2} {unit}", round(100.0 * value) / 100.0),
        false => format!("{:.1} {unit}", round(10.0 * value) / 10.0),
    }
}
