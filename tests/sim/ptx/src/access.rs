//! Loads, stores, atomics and asynchronous copies, in every space.

use crate::block::Block;
use crate::instruction::{Address, Op, Place, Reg, Space};
use crate::scalar::{Scalar, WARP};
use crate::shared::Access;
use crate::types::Type;
use crate::warp::{Flight, Warp, bits};
use crate::{FaultKind, Problem};

/// The most bytes that one lane accesses at once.
const WIDEST: usize = 64;

impl Warp {
    /// Space and address in it, checked for alignment.
    fn resolve(&self, address: &Address, lane: usize, size: usize) -> Result<(Space, u64), Problem> {
        let base = self.registers[address.base][lane];
        let base = if address.narrow { u64::from(base as u32) } else { base };
        let at = base.wrapping_add(address.offset as u64);
        let (space, at) =
            if address.space == Space::Generic { Space::of_generic(at) } else { (address.space, at) };
        if at.is_multiple_of(size as u64) {
            return Ok((space, at));
        }
        let what = format!("access of {size} bytes at {at:#x} ({space:?} memory) is misaligned");
        Err(Problem::new(FaultKind::Misaligned, what))
    }

    fn read(
        &mut self,
        lane: usize,
        space: Space,
        at: u64,
        into: &mut [u8],
        place: Place,
        block: &mut Block<'_>,
    ) -> Result<(), Problem> {
        match space {
            Space::Global | Space::Generic => {
                block.memory.read(at, into)?;
                block.touched.add(Access::Read, at, into.len(), place);
            }
            Space::Shared => {
                into.copy_from_slice(block.shared.access(Access::Read, self.thread(lane), at, into.len())?)
            }
            Space::Parameter => into.copy_from_slice(slice(block.parameters, space, at, into.len())?),
            Space::Constant => into.copy_from_slice(slice(block.constants, space, at, into.len())?),
            Space::Local => {
                let (bytes, written) = &self.local[lane];
                into.copy_from_slice(slice(bytes, space, at, into.len())?);
                if written[at as usize..][..into.len()].contains(&false) {
                    return Err(Problem::new(
                        FaultKind::Uninitialised,
                        format!("read of local memory at {at}, which was never written"),
                    ));
                }
            }
        }
        Ok(())
    }

    fn write(
        &mut self,
        lane: usize,
        space: Space,
        at: u64,
        from: &[u8],
        place: Place,
        block: &mut Block<'_>,
    ) -> Result<(), Problem> {
        match space {
            Space::Global | Space::Generic => {
                block.memory.write(at, from)?;
                block.touched.add(Access::Write, at, from.len(), place);
            }
            Space::Shared => {
                block.shared.access(Access::Write, self.thread(lane), at, from.len())?.copy_from_slice(from)
            }
            Space::Local => {
                let (bytes, written) = &mut self.local[lane];
                slice(bytes, space, at, from.len())?;
                bytes[at as usize..][..from.len()].copy_from_slice(from);
                written[at as usize..][..from.len()].fill(true);
            }
            Space::Parameter | Space::Constant => {
                let what = format!("write to {space:?} memory at {at}, which is read-only");
                return Err(Problem::new(FaultKind::OutOfBounds, what));
            }
        }
        Ok(())
    }

    pub(crate) fn load(
        &mut self,
        address: &Address,
        ty: Type,
        to: &[Reg],
        active: u32,
        place: Place,
        block: &mut Block<'_>,
    ) -> Result<(), Problem> {
        let (size, mut buffer) = (ty.size(), [0; WIDEST]);
        let buffer = &mut buffer[..size * to.len()];
        for lane in bits(active) {
            let located = |problem: Problem| problem.at(lane);
            let (space, at) = self
                .resolve(address, lane, if address.space == Space::Parameter { size } else { buffer.len() })
                .map_err(located)?;
            self.read(lane, space, at, buffer, place, block).map_err(located)?;
            for (&to, bytes) in to.iter().zip(buffer.chunks(size)) {
                self.registers[to][lane] = number(bytes, ty);
            }
        }
        Ok(())
    }

    pub(crate) fn store(
        &mut self,
        address: &Address,
        ty: Type,
        from: &[Reg],
        active: u32,
        place: Place,
        block: &mut Block<'_>,
    ) -> Result<(), Problem> {
        let (size, mut buffer) = (ty.size(), [0; WIDEST]);
        let buffer = &mut buffer[..size * from.len()];
        for lane in bits(active) {
            for (&from, bytes) in from.iter().zip(buffer.chunks_mut(size)) {
                bytes.copy_from_slice(&self.registers[from][lane].to_le_bytes()[..size]);
            }
            let (space, at) =
                self.resolve(address, lane, buffer.len()).map_err(|problem| problem.at(lane))?;
            self.write(lane, space, at, buffer, place, block).map_err(|problem| problem.at(lane))?;
        }
        Ok(())
    }

    /// Lane by lane, in order: which lane goes first is as unspecified as on the device.
    pub(crate) fn atomic(
        &mut self,
        op: &Op,
        active: u32,
        place: Place,
        block: &mut Block<'_>,
    ) -> Result<(), Problem> {
        let Op::Atomic { address, ty, f, to, operand, compare } = op else {
            unreachable!("called for atomics only")
        };
        let (size, mut buffer) = (ty.size(), [0; 8]);
        let buffer = &mut buffer[..size];
        for lane in bits(active) {
            let located = |problem: Problem| problem.at(lane);
            let (space, at) = self.resolve(address, lane, size).map_err(located)?;
            let shared = space == Space::Shared;
            match space {
                Space::Shared => buffer.copy_from_slice(
                    block.shared.access(Access::Atomic, self.thread(lane), at, size).map_err(located)?,
                ),
                Space::Global => block.memory.read(at, buffer).map_err(located)?,
                _ => {
                    return Err(located(Problem::new(
                        FaultKind::OutOfBounds,
                        format!("an atomic in {space:?} memory"),
                    )));
                }
            }
            let old = number(buffer, *ty);
            let swaps = compare
                .is_none_or(|reg| number(&self.registers[reg][lane].to_le_bytes()[..size], *ty) == old);
            let zero = [0; WARP];
            let new = f(&[&[old; WARP], &[self.registers[*operand][lane]; WARP], &zero, &zero])[0];
            let new = if swaps { new } else { old }.to_le_bytes();
            if shared {
                block.shared.bytes[at as usize..][..size].copy_from_slice(&new[..size]);
            } else {
                block.memory.write(at, &new[..size]).map_err(located)?;
                block.touched.add(Access::Atomic, at, size, place);
            }
            self.registers[*to][lane] = old;
        }
        Ok(())
    }

    /// `cp.async`: the source is read now, the target written when its lane waits for it, so that whoever does not wait is
    /// found out.
    pub(crate) fn copy(
        &mut self,
        op: &Op,
        active: u32,
        place: Place,
        block: &mut Block<'_>,
    ) -> Result<(), Problem> {
        let &Op::CopyAsync { ref to, ref from, size, source } = op else {
            unreachable!("called for copies only")
        };
        for lane in bits(active) {
            let located = |problem: Problem| problem.at(lane);
            let (_, to) = self.resolve(to, lane, size).map_err(located)?;
            let (_, from) = self.resolve(from, lane, size).map_err(located)?;
            // What the source does not give is zero.
            let given = source.map_or(size, |reg| (self.registers[reg][lane] as u32 as usize).min(size));
            let mut data = vec![0; size];
            if given > 0 {
                self.read(lane, Space::Global, from, &mut data[..given], place, block).map_err(located)?;
            }
            block.shared.launch(self.thread(lane), to, size).map_err(located)?;
            let group = self.groups[lane];
            self.flights[lane].push(Flight { to, data, group });
        }
        Ok(())
    }

    /// Lands the lane's copies, but for those of its newest `pending` groups.
    pub(crate) fn land(&mut self, lane: usize, pending: Option<usize>, block: &mut Block<'_>) {
        let until = pending.map_or(usize::MAX, |pending| self.groups[lane].saturating_sub(pending));
        let thread = self.thread(lane);
        self.flights[lane].retain(|flight| {
            let landed = flight.group < until;
            if landed {
                block.shared.land(thread, flight.to, &flight.data);
            }
            !landed
        });
    }
}

fn slice(bytes: &[u8], space: Space, at: u64, length: usize) -> Result<&[u8], Problem> {
    let found = usize::try_from(at).ok().and_then(|at| bytes.get(at..at.checked_add(length)?));
    found.ok_or_else(|| {
        let what =
            format!("access of {length} bytes at {at:#x} of {} bytes of {space:?} memory", bytes.len());
        Problem::new(FaultKind::OutOfBounds, what)
    })
}

/// Little-endian bytes as a register holds them: signed ones with their sign up to bit 63.
fn number(bytes: &[u8], ty: Type) -> u64 {
    let mut wide = [0; 8];
    wide[..bytes.len().min(8)].copy_from_slice(&bytes[..bytes.len().min(8)]);
    let value = u64::from_le_bytes(wide);
    match ty {
        Type::S8 => i8::of(value).bits(),
        Type::S16 => i16::of(value).bits(),
        Type::S32 => i32::of(value).bits(),
        _ => value,
    }
}
