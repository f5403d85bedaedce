//! Runs CUDA kernels without a GPU, from the PTX that NVRTC makes of them, and checks every access.
//!
//! A [`Module`] is loaded from text; [`Module::launch`] runs one kernel on a [`Memory`] and returns what it touched, or the
//! first [`Fault`] with its line of the `.cu` file (compile with `-lineinfo`).
//!
//! ```
//! use ebbtide_ptx::{Heap, Launch, Memory, Module};
//! let module = Module::load(
//!     ".version 9.0
//!      .visible .entry answer(.param .u64 out) {
//!          .reg .b64 %rd<2>;
//!          ld.param.u64 %rd1, [out];
//!          st.global.u32 [%rd1], 42;
//!          ret;
//!      }",
//! )?;
//! let mut heap = Heap::default();
//! let out = heap.alloc(4);
//! let report = module.launch(&Launch { arguments: &[&out.to_le_bytes()], ..Launch::new("answer") }, &mut heap)?;
//! let mut bytes = [0; 4];
//! heap.read(out, &mut bytes)?;
//! assert_eq!((u32::from_le_bytes(bytes), report.writes), (42, vec![out..out + 4]));
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! **How it works.** `text` cuts the text into statements, `parse` finds kernels, variables and labels, `decode` makes an
//! `instruction` of each statement; `map` is the table of pure instructions, each a function on 32 lanes. `block` lets a
//! block's warps take turns, `warp` runs lanes together while they are at the same instruction; `access`, `collective`
//! and `shared` do what reaches beyond a lane. Blocks run one after another.
//!
//! **What is checked**: bounds, alignment and initialisation of every access; races in shared memory, between warps and between
//! lanes of one warp; races between blocks in global memory, unless the kernel has fences and so orders its blocks itself; lanes
//! missing from a barrier, shuffle or vote; use of what `cp.async` has not landed; barriers that wait for ever.
//!
//! **What differs from a GPU**: approximate instructions are as accurate as f32 allows; tensor cores sum in order; a warp's lanes
//! meet again as early as possible, and `bar.warp.sync` only at one instruction; races within one block in global memory are not
//! looked for; there are no function calls, `wgmma`, bulk copies, textures or module-level `.global` variables: a kernel that
//! needs one is an error when it is launched.

mod access;
mod block;
mod collective;
mod decode;
mod error;
mod instruction;
mod map;
mod memory;
mod parse;
mod scalar;
mod shared;
mod text;
mod touched;
mod types;
mod warp;

pub use error::{Error, Fault, FaultKind, Problem};
pub use memory::{Heap, Memory};

use block::{Block, Located, thread_index};
use instruction::{Kernel, Place};
use shared::Shared;
use std::collections::HashMap;
use std::ops::Range;
use touched::Touched;

/// A loaded PTX text.
#[derive(Debug)]
pub struct Module {
    kernels: Vec<(String, Result<Kernel, Error>)>,
    constants: Vec<u8>,
    files: HashMap<u32, String>,
}

/// What to run, and how.
#[derive(Debug, Clone)]
pub struct Launch<'a> {
    /// The kernel's name.
    pub kernel: &'a str,
    /// Blocks along x, y and z.
    pub grid: [u32; 3],
    /// Threads a block along x, y and z.
    pub block: [u32; 3],
    /// Dynamic shared memory a block.
    pub shared_bytes: usize,
    /// Each argument's bytes, little-endian.
    pub arguments: &'a [&'a [u8]],
    /// Order of blocks and warps: 0 is ascending, any other value an order of its own.
    pub seed: u64,
    /// Instructions, each counted once for a warp, after which the launch fails.
    pub limit: u64,
}

impl<'a> Launch<'a> {
    /// One thread, no arguments, in ascending order, with a limit of 2³² instructions.
    pub fn new(kernel: &'a str) -> Self {
        Self { kernel, grid: [1; 3], block: [1; 3], shared_bytes: 0, arguments: &[], seed: 0, limit: 1 << 32 }
    }
}

/// What a launch did.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Report {
    /// Ranges of global memory that were read, sorted and apart.
    pub reads: Vec<Range<u64>>,
    /// Ranges of global memory that were written.
    pub writes: Vec<Range<u64>>,
    /// Instructions, each counted once for a warp.
    pub instructions: u64,
}

/// Threads a block at most, and its shared memory at most (227 KiB, compute capability 9.0).
const THREADS: u64 = 1024;
const SHARED_BYTES: usize = 227 << 10;

impl Module {
    /// Reads PTX.
    ///
    /// # Errors
    /// [`Error::Text`] where the text is not understood. A kernel that needs what is not supported is an error of its launch.
    pub fn load(ptx: &str) -> Result<Self, Error> {
        let (items, files) = text::split(ptx)?;
        let parsed = parse::parse(&items)?;
        Ok(Self { kernels: parsed.kernels, constants: parsed.constants, files })
    }

    /// Names of the kernels, in the text's order.
    pub fn kernels(&self) -> impl Iterator<Item = &str> {
        self.kernels.iter().map(|(name, _)| name.as_str())
    }

    /// Bytes of each parameter of a kernel.
    ///
    /// # Errors
    /// There is no such kernel, or it needs what is not supported.
    pub fn parameters(&self, kernel: &str) -> Result<Vec<usize>, Error> {
        Ok(self.kernel(kernel)?.parameters.iter().map(|(_, size)| *size).collect())
    }

    fn kernel(&self, name: &str) -> Result<&Kernel, Error> {
        let found = self.kernels.iter().find(|(known, _)| known == name);
        let known = || self.kernels().collect::<Vec<_>>().join(", ");
        let (_, kernel) = found.ok_or_else(|| Error::Unknown { name: name.into(), known: known() })?;
        kernel.as_ref().map_err(Clone::clone)
    }

    /// Runs a kernel to its end, block after block.
    ///
    /// # Errors
    /// The kernel is unknown or not supported, the launch does not fit it, or it breaks a rule.
    pub fn launch(&self, launch: &Launch<'_>, memory: &mut dyn Memory) -> Result<Report, Error> {
        let kernel = self.kernel(launch.kernel)?;
        let parameters = checked(kernel, launch)?;
        let mut random = fastrand::Rng::with_seed(launch.seed);
        let mut blocks: Vec<_> = (0..launch.grid.iter().map(|&n| u64::from(n)).product()).collect();
        if launch.seed != 0 {
            random.shuffle(&mut blocks);
        }
        let (mut touched, mut left) = (Touched::default(), launch.limit);
        let warps = launch.block.iter().product::<u32>().div_ceil(32) as usize;
        for number in blocks {
            let [x, y] = [u64::from(launch.grid[0]), u64::from(launch.grid[1])];
            let index = [number % x, number / x % y, number / (x * y)].map(|index| index as u32);
            let shared_bytes = kernel.shared_bytes.next_multiple_of(16) + launch.shared_bytes;
            let mut block = Block {
                kernel,
                launch,
                index,
                parameters: &parameters,
                constants: &self.constants,
                shared: Shared::new(shared_bytes, kernel.granule, warps),
                memory: &mut *memory,
                touched: &mut touched,
                left: &mut left,
            };
            block.run(&mut random).map_err(|located| self.fault(launch, index, located))?;
            if let Some((address, place)) = touched.end_block(!kernel.fences) {
                let what = format!(
                    "race: global memory at {address:#x} is also used by another block, and one of them writes it"
                );
                let problem = Problem::new(FaultKind::Race, what);
                return Err(self.fault(launch, index, Located { problem, place, warp: 0 }));
            }
        }
        let (reads, writes) = touched.finish();
        Ok(Report { reads, writes, instructions: launch.limit - left })
    }

    fn fault(&self, launch: &Launch<'_>, block: [u32; 3], located: Located) -> Error {
        let Located { problem, place: Place { file, line }, warp } = located;
        Error::Fault(Fault {
            kind: problem.kind,
            what: problem.what,
            kernel: launch.kernel.into(),
            file: self.files.get(&file).cloned().unwrap_or_else(|| "?".into()),
            line,
            block,
            thread: problem.lane.map(|lane| thread_index(warp * 32 + lane, launch.block)),
        })
    }
}

/// The bytes of the parameters, if the launch fits the kernel.
fn checked(kernel: &Kernel, launch: &Launch<'_>) -> Result<Vec<u8>, Error> {
    let fail = |what: String| Err(Error::Launch { kernel: kernel.name.clone(), what });
    let threads = launch.block.iter().map(|&n| u64::from(n)).product::<u64>();
    let most = kernel.max_threads.map_or(THREADS, u64::from);
    if !(1..=most).contains(&threads) {
        return fail(format!("expected 1 to {most} threads a block, found {threads} ({:?})", launch.block));
    }
    if launch.grid.contains(&0) || launch.grid[1] > 0xffff || launch.grid[2] > 0xffff {
        return fail(format!(
            "expected a grid of at least one block and at most 65535 along y and z, found {:?}",
            launch.grid
        ));
    }
    let shared = kernel.shared_bytes.next_multiple_of(16).saturating_add(launch.shared_bytes);
    if shared > SHARED_BYTES {
        return fail(format!("expected at most {SHARED_BYTES} bytes of shared memory, found {shared}"));
    }
    let expected: Vec<_> = kernel.parameters.iter().map(|(_, size)| *size).collect();
    let found: Vec<_> = launch.arguments.iter().map(|argument| argument.len()).collect();
    if expected != found {
        return fail(format!("expected arguments of {expected:?} bytes, found {found:?}"));
    }
    let mut bytes = vec![0; kernel.parameters.last().map_or(0, |(offset, size)| offset + size)];
    for ((offset, size), argument) in kernel.parameters.iter().zip(launch.arguments) {
        bytes[*offset..offset + size].copy_from_slice(argument);
    }
    Ok(bytes)
}
