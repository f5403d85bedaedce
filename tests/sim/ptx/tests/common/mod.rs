//! What the interpreter's tests share: arrays in its memory, and launches.
#![allow(dead_code, unreachable_pub)] // Each test uses its part.

use ebbtide_ptx::{Error, Heap, Launch, Memory, Module, Report};
use half::{bf16, f16};

/// A number as memory holds it, little-endian.
pub trait Number: Copy {
    const SIZE: usize;
    fn bytes(self) -> Vec<u8>;
    fn of(bytes: &[u8]) -> Self;
}

macro_rules! numbers {
    ($($t:ty)*) => {$(
        impl Number for $t {
            const SIZE: usize = size_of::<Self>();
            fn bytes(self) -> Vec<u8> {
                self.to_le_bytes().to_vec()
            }
            fn of(bytes: &[u8]) -> Self {
                Self::from_le_bytes(bytes.try_into().unwrap())
            }
        }
    )*};
}
numbers!(u8 i8 u16 i16 u32 i32 u64 i64 f16 bf16 f32 f64);

/// Allocates and fills.
pub fn upload<T: Number>(heap: &mut Heap, values: &[T]) -> u64 {
    heap.alloc_from(&values.iter().flat_map(|value| value.bytes()).collect::<Vec<_>>())
}

/// All of an allocation, every byte of which has to be written.
pub fn download<T: Number>(heap: &mut Heap, address: u64) -> Vec<T> {
    let (_, length) = heap.find(address).unwrap();
    let mut bytes = vec![0; length];
    heap.read(address, &mut bytes).unwrap();
    bytes.chunks(T::SIZE).map(T::of).collect()
}

/// Launches `blocks` of `threads`, both along x, in the order of `seed`.
pub fn launch(
    module: &Module,
    kernel: &str,
    [blocks, threads]: [usize; 2],
    arguments: &[Vec<u8>],
    seed: u64,
    heap: &mut Heap,
) -> Result<Report, Error> {
    let arguments: Vec<_> = arguments.iter().map(Vec::as_slice).collect();
    let (grid, block) = ([blocks as u32, 1, 1], [threads as u32, 1, 1]);
    module.launch(&Launch { grid, block, arguments: &arguments, seed, ..Launch::new(kernel) }, heap)
}
