//! Global memory as a kernel sees it, and a plain implementation.

use crate::{FaultKind, Problem};
use std::collections::BTreeMap;

/// What the interpreter asks of global memory. Alignment is checked before; bounds and initialisation are the memory's.
pub trait Memory {
    /// Fills `into` from `address`.
    ///
    /// # Errors
    /// The bytes lie in no allocation, or were never written.
    fn read(&mut self, address: u64, into: &mut [u8]) -> Result<(), Problem>;

    /// Stores `from` at `address`.
    ///
    /// # Errors
    /// The bytes lie in no allocation.
    fn write(&mut self, address: u64, from: &[u8]) -> Result<(), Problem>;
}

/// Separate allocations, each known byte by byte: there or not, written or not.
///
/// An address is never used twice, and [`Heap::GAP`] bytes lie between neighbours, so that an overrun hits nothing.
#[derive(Debug)]
pub struct Heap {
    allocations: BTreeMap<u64, Allocation>,
    next: u64,
}

#[derive(Debug)]
struct Allocation {
    bytes: Vec<u8>,
    written: Vec<bool>,
}

impl Default for Heap {
    fn default() -> Self {
        Self { allocations: BTreeMap::new(), next: Self::BASE }
    }
}

impl Heap {
    /// The first address handed out: far from any that a process has.
    pub const BASE: u64 = 0x7f00_0000_0000_0000;
    /// Bytes between allocations.
    pub const GAP: u64 = 4096;
    /// What unwritten bytes hold.
    pub const POISON: u8 = 0xcd;
    /// Every allocation's address is a multiple of it, as CUDA's are.
    pub const ALIGNMENT: u64 = 256;

    /// Reserves `bytes` bytes, poisoned, and returns their address.
    pub fn alloc(&mut self, bytes: usize) -> u64 {
        let address = self.next;
        self.next = (address + bytes as u64 + Self::GAP).next_multiple_of(Self::ALIGNMENT);
        self.allocations
            .insert(address, Allocation { bytes: vec![Self::POISON; bytes], written: vec![false; bytes] });
        address
    }

    /// Allocates and fills.
    pub fn alloc_from(&mut self, bytes: &[u8]) -> u64 {
        let address = self.alloc(bytes.len());
        self.write(address, bytes).expect("a new allocation holds what it was made for");
        address
    }

    /// Gives an allocation back: its length, or `None` if `address` is not the start of one.
    pub fn free(&mut self, address: u64) -> Option<usize> {
        self.allocations.remove(&address).map(|allocation| allocation.bytes.len())
    }

    /// Start and length of the allocation that `address` lies in.
    pub fn find(&self, address: u64) -> Option<(u64, usize)> {
        let (&start, allocation) = self.allocations.range(..=address).next_back()?;
        (address - start < allocation.bytes.len() as u64).then_some((start, allocation.bytes.len()))
    }

    /// Start and length of every allocation.
    pub fn allocations(&self) -> impl Iterator<Item = (u64, usize)> {
        self.allocations.iter().map(|(&start, allocation)| (start, allocation.bytes.len()))
    }

    /// `length` bytes at `address`, whether written or not, and for each whether it was.
    ///
    /// # Errors
    /// They lie in no allocation.
    pub fn inspect(&self, address: u64, length: usize) -> Result<(&[u8], &[bool]), Problem> {
        let (start, _) = self.find(address).ok_or_else(|| self.outside(address, length))?;
        let (allocation, at) = (&self.allocations[&start], (address - start) as usize);
        match (allocation.bytes.get(at..at + length), allocation.written.get(at..at + length)) {
            (Some(bytes), Some(written)) => Ok((bytes, written)),
            _ => Err(self.outside(address, length)),
        }
    }

    /// Makes bytes unwritten again.
    ///
    /// # Errors
    /// They lie in no allocation.
    pub fn poison(&mut self, address: u64, length: usize) -> Result<(), Problem> {
        let (bytes, written) = self.slot(address, length)?;
        bytes.fill(Self::POISON);
        written.fill(false);
        Ok(())
    }

    fn slot(&mut self, address: u64, length: usize) -> Result<(&mut [u8], &mut [bool]), Problem> {
        let (start, total) = self.find(address).ok_or_else(|| self.outside(address, length))?;
        let at = (address - start) as usize;
        if length > total - at {
            return Err(self.outside(address, length));
        }
        let allocation = self.allocations.get_mut(&start).expect("found above");
        Ok((&mut allocation.bytes[at..at + length], &mut allocation.written[at..at + length]))
    }

    fn outside(&self, address: u64, length: usize) -> Problem {
        let place = match self.allocations.range(..=address).next_back() {
            Some((start, allocation)) => {
                let (size, past) =
                    (allocation.bytes.len(), (address - start) as i64 - allocation.bytes.len() as i64);
                match past {
                    ..0 => {
                        format!("it ends {} bytes past the {size} bytes at {start:#x}", past + length as i64)
                    }
                    _ => format!("it starts {past} bytes past the {size} bytes at {start:#x}"),
                }
            }
            None => "no allocation lies before it".into(),
        };
        Problem::new(
            FaultKind::OutOfBounds,
            format!("access of {length} bytes at {address:#x} is out of bounds: {place}"),
        )
    }
}

impl Memory for Heap {
    fn read(&mut self, address: u64, into: &mut [u8]) -> Result<(), Problem> {
        let (bytes, written) = self.inspect(address, into.len())?;
        if let Some(at) = written.iter().position(|written| !written) {
            let what =
                format!("read of {} bytes at {address:#x}, of which byte {at} was never written", into.len());
            return Err(Problem::new(FaultKind::Uninitialised, what));
        }
        into.copy_from_slice(bytes);
        Ok(())
    }

    fn write(&mut self, address: u64, from: &[u8]) -> Result<(), Problem> {
        let (bytes, written) = self.slot(address, from.len())?;
        bytes.copy_from_slice(from);
        written.fill(true);
        Ok(())
    }
}
