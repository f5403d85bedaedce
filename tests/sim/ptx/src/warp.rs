//! A warp: 32 lanes that run together while they are at the same instruction.
//!
//! Of the lanes that can run, those at the lowest instruction go first, up to where others stand: so lanes that parted meet
//! again at the first instruction that they share, without an analysis of the program. Lanes at a warp collective wait until
//! everybody that it names is there.

use crate::block::{Block, Located};
use crate::instruction::{Instruction, Op, Place, Reg};
use crate::scalar::{Lanes, Scalar, WARP, flush};
use crate::{FaultKind, Problem};

/// Where a warp waits.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Arrival {
    pub(crate) id: u64,
    /// Threads that the barrier waits for; all of the block's if `None`.
    pub(crate) threads: Option<u32>,
    pub(crate) place: Place,
}

/// A `cp.async` that has not landed.
pub(crate) struct Flight {
    pub(crate) to: u64,
    pub(crate) data: Vec<u8>,
    /// Groups that its lane had committed before.
    pub(crate) group: usize,
}

pub(crate) struct Warp {
    pub(crate) index: usize,
    pub(crate) registers: Vec<Lanes>,
    pc: [usize; WARP],
    /// Lanes, as bits: that there are, that have not ended, that wait for others of the warp.
    lanes: u32,
    pub(crate) alive: u32,
    waiting: u32,
    /// Lanes at a barrier of the block, until all of the warp are.
    at_barrier: u32,
    pub(crate) arrival: Option<Arrival>,
    /// Local memory of each lane, and which bytes of it were written.
    pub(crate) local: Vec<(Vec<u8>, Vec<bool>)>,
    pub(crate) flights: Vec<Vec<Flight>>,
    /// `cp.async` groups that each lane has committed.
    pub(crate) groups: [usize; WARP],
}

/// What follows an instruction.
enum Flow {
    Next,
    Jump(usize),
    /// The lanes part, wait or end; their places are set.
    Part,
}

pub(crate) fn bits(mask: u32) -> impl Iterator<Item = usize> {
    (0..WARP).filter(move |lane| mask >> lane & 1 != 0)
}

impl Warp {
    pub(crate) fn new(index: usize, lanes: usize, registers: Vec<Lanes>, local_bytes: usize) -> Self {
        let mask = ((1_u64 << lanes) - 1) as u32;
        Self {
            index,
            registers,
            pc: [0; WARP],
            lanes: mask,
            alive: mask,
            waiting: 0,
            at_barrier: 0,
            arrival: None,
            local: vec![(vec![crate::Heap::POISON; local_bytes], vec![false; local_bytes]); WARP],
            flights: (0..WARP).map(|_| Vec::new()).collect(),
            groups: [0; WARP],
        }
    }

    pub(crate) fn can_run(&self) -> bool {
        self.alive != 0 && self.arrival.is_none()
    }

    pub(crate) fn thread(&self, lane: usize) -> usize {
        self.index * WARP + lane
    }

    /// Runs until the warp waits at a barrier of the block or has ended.
    pub(crate) fn run(&mut self, block: &mut Block<'_>) -> Result<(), Located> {
        let code = &block.kernel.code;
        while let Some((mut pc, lanes, meeting)) = self.next_group() {
            loop {
                let instruction = &code[pc];
                let located = |problem| Located { problem, place: instruction.place, warp: self.index };
                if *block.left == 0 {
                    let what = format!("more than {} warp instructions", block.launch.limit);
                    return Err(located(Problem::new(FaultKind::TooLong, what)));
                }
                *block.left -= 1;
                match self.step(instruction, pc, lanes, block) {
                    Ok(Flow::Next) => pc += 1,
                    Ok(Flow::Jump(target)) => pc = target,
                    Ok(Flow::Part) => break,
                    Err(problem) => {
                        return Err(Located { problem, place: instruction.place, warp: self.index });
                    }
                }
                if pc >= meeting {
                    bits(lanes).for_each(|lane| self.pc[lane] = pc);
                    break;
                }
            }
        }
        self.stuck(code)?;
        self.arrive(code)
    }

    /// The lowest instruction that lanes stand at, which lanes, and the next one where others do.
    fn next_group(&self) -> Option<(usize, u32, usize)> {
        let ready = self.alive & !self.waiting & !self.at_barrier;
        let pc = bits(ready).map(|lane| self.pc[lane]).min()?;
        let lanes = bits(ready).filter(|&lane| self.pc[lane] == pc).fold(0, |mask, lane| mask | 1 << lane);
        let meeting = bits(ready & !lanes).map(|lane| self.pc[lane]).min().unwrap_or(usize::MAX);
        Some((pc, lanes, meeting))
    }

    /// Lanes that wait for others of the warp which can no longer come.
    fn stuck(&self, code: &[Instruction]) -> Result<(), Located> {
        let Some(lane) = bits(self.waiting).next() else { return Ok(()) };
        let pc = self.pc[lane];
        let here =
            bits(self.waiting).filter(|&other| self.pc[other] == pc).fold(0, |mask, lane| mask | 1 << lane);
        let missing: Vec<_> = bits(self.members(&code[pc].op, lane) & !here).collect();
        let what = format!(
            "lanes {missing:?} of warp {} never reach the warp collective that names them",
            self.index
        );
        let problem = Problem::new(FaultKind::MissingLane, what).at(lane);
        Err(Located { problem, place: code[pc].place, warp: self.index })
    }

    /// All lanes are at a barrier or have ended: it has to be one barrier and all lanes, since `bar.sync` is an aligned one.
    fn arrive(&mut self, code: &[Instruction]) -> Result<(), Located> {
        let Some(first) = bits(self.at_barrier).next() else { return Ok(()) };
        let pc = self.pc[first];
        let elsewhere: Vec<_> = bits(self.lanes)
            .filter(|&lane| self.at_barrier >> lane & 1 == 0 || self.pc[lane] != pc)
            .collect();
        let place = code[pc].place;
        if !elsewhere.is_empty() {
            let what = format!(
                "lanes {elsewhere:?} of warp {} never reach the barrier that its other lanes wait at",
                self.index
            );
            return Err(Located {
                problem: Problem::new(FaultKind::MissingLane, what).at(first),
                place,
                warp: self.index,
            });
        }
        let Op::Barrier { id, threads, .. } = code[pc].op else {
            unreachable!("lanes wait at barriers only")
        };
        let threads = threads.map(|reg| self.registers[reg][first] as u32);
        self.arrival = Some(Arrival { id: self.registers[id][first], threads, place });
        self.at_barrier = 0;
        bits(self.lanes).for_each(|lane| self.pc[lane] = pc + 1);
        Ok(())
    }

    fn guarded(&self, guard: Option<(Reg, bool)>, lanes: u32) -> u32 {
        let Some((reg, negate)) = guard else { return lanes };
        let holds = (0..WARP)
            .fold(0, |mask, lane| mask | u32::from((self.registers[reg][lane] & 1 != 0) != negate) << lane);
        lanes & holds
    }

    /// Stores a result in the lanes given.
    pub(crate) fn set(&mut self, to: Reg, value: &Lanes, lanes: u32) {
        let register = &mut self.registers[to];
        if lanes == !0 {
            *register = *value;
        } else {
            bits(lanes).for_each(|lane| register[lane] = value[lane]);
        }
    }

    /// The lanes that a warp collective names.
    fn members(&self, op: &Op, lane: usize) -> u32 {
        match *op {
            Op::Shuffle { members, .. }
            | Op::Vote { members, .. }
            | Op::Reduce { members, .. }
            | Op::WarpBarrier { members } => self.registers[members][lane] as u32,
            _ => self.lanes,
        }
    }

    /// Whether everybody that a collective names is here; if not, the lanes wait. Returns the lanes that go on together.
    fn gather(&mut self, op: &Op, pc: usize, lanes: u32) -> Option<u32> {
        let members = bits(lanes).map(|lane| self.members(op, lane)).fold(0, |all, one| all | one);
        let here =
            bits(self.waiting).filter(|&lane| self.pc[lane] == pc).fold(lanes, |mask, lane| mask | 1 << lane);
        if members & self.lanes & !here == 0 {
            self.waiting &= !here;
            return Some(here);
        }
        bits(lanes).for_each(|lane| self.pc[lane] = pc);
        self.waiting |= lanes;
        None
    }

    fn step(
        &mut self,
        instruction: &Instruction,
        pc: usize,
        lanes: u32,
        block: &mut Block<'_>,
    ) -> Result<Flow, Problem> {
        let active = self.guarded(instruction.guard, lanes);
        if active == 0 {
            return Ok(Flow::Next);
        }
        let r = |reg: Reg| &self.registers[reg];
        match &instruction.op {
            &Op::Map { f, to, from, flush: flushes, saturate } => {
                let value = if flushes || saturate {
                    let sources = from.map(|reg| r(reg).map(|bits| if flushes { flush(bits) } else { bits }));
                    adjusted(f(&sources.each_ref()), flushes, saturate)
                } else {
                    f(&from.map(r))
                };
                self.set(to, &value, active);
            }
            &Op::Logic { table, to, from: [a, b, c] } => {
                let (a, b, c) = (*r(a), *r(b), *r(c));
                self.set(to, &std::array::from_fn(|lane| logic(table, a[lane], b[lane], c[lane])), active);
            }
            Op::Pack { to, from, bits: total } => {
                let width = total / from.len() as u32;
                let part = |index: usize, lane: usize| {
                    (r(from[index])[lane] & (u64::MAX >> (64 - width))) << (width * index as u32)
                };
                let value = std::array::from_fn(|lane| {
                    (0..from.len()).fold(0, |whole, index| whole | part(index, lane))
                });
                self.set(*to, &value, active);
            }
            Op::Unpack { to, from, bits: total } => {
                let (whole, width) = (*r(*from), total / to.len() as u32);
                for (index, &to) in to.iter().enumerate() {
                    self.set(
                        to,
                        &whole.map(|bits| bits >> (width * index as u32) & (u64::MAX >> (64 - width))),
                        active,
                    );
                }
            }
            &Op::Branch { target } if active == lanes => return Ok(Flow::Jump(target)),
            &Op::Branch { target } => {
                bits(lanes)
                    .for_each(|lane| self.pc[lane] = if active >> lane & 1 != 0 { target } else { pc + 1 });
                return Ok(Flow::Part);
            }
            Op::BranchTable { index, targets } => {
                for lane in bits(lanes) {
                    let entry = self.registers[*index][lane] as u32 as usize;
                    let target =
                        if active >> lane & 1 != 0 { targets.get(entry).copied() } else { Some(pc + 1) };
                    let out = || {
                        Problem::new(
                            FaultKind::OutOfBounds,
                            format!("branch {entry} of a table of {}", targets.len()),
                        )
                    };
                    self.pc[lane] = target.ok_or_else(|| out().at(lane))?;
                }
                return Ok(Flow::Part);
            }
            Op::Exit => {
                bits(active).for_each(|lane| self.land(lane, None, block));
                self.alive &= !active;
                bits(lanes & !active).for_each(|lane| self.pc[lane] = pc + 1);
                return Ok(Flow::Part);
            }
            Op::Trap => {
                let lane = active.trailing_zeros() as usize;
                return Err(Problem::new(FaultKind::Trap, "the kernel trapped").at(lane));
            }
            Op::Barrier { waits: true, .. } => {
                bits(lanes)
                    .for_each(|lane| self.pc[lane] = if active >> lane & 1 != 0 { pc } else { pc + 1 });
                self.at_barrier |= active;
                return Ok(Flow::Part);
            }
            Op::Barrier { waits: false, .. } => {
                return Err(Problem::new(FaultKind::Deadlock, "bar.arrive is not supported"));
            }
            Op::Load { address, ty, to } => self.load(address, *ty, to, active, instruction.place, block)?,
            Op::Store { address, ty, from } => {
                self.store(address, *ty, from, active, instruction.place, block)?
            }
            Op::Atomic { .. } => self.atomic(&instruction.op, active, instruction.place, block)?,
            Op::CopyAsync { .. } => self.copy(&instruction.op, active, instruction.place, block)?,
            Op::CopyCommit => bits(active).for_each(|lane| self.groups[lane] += 1),
            Op::CopyWait { pending } => bits(active).for_each(|lane| self.land(lane, *pending, block)),
            Op::Fence => {}
            Op::ActiveMask { to } => self.set(*to, &[active.into(); WARP], active),
            collective => {
                if active != lanes {
                    // The others go on; the active ones come back here by themselves.
                    bits(lanes)
                        .for_each(|lane| self.pc[lane] = if active >> lane & 1 != 0 { pc } else { pc + 1 });
                    return Ok(Flow::Part);
                }
                let Some(here) = self.gather(collective, pc, lanes) else { return Ok(Flow::Part) };
                self.collective(collective, here, block)?;
                if here != lanes {
                    bits(here).for_each(|lane| self.pc[lane] = pc + 1);
                    return Ok(Flow::Part);
                }
            }
        }
        Ok(Flow::Next)
    }
}

fn adjusted(value: Lanes, flushes: bool, saturate: bool) -> Lanes {
    value.map(|bits| {
        let bits = if flushes { flush(bits) } else { bits };
        let value = f32::of(bits);
        // A NaN saturates to 0.
        if saturate { if value.is_nan() { 0.0 } else { value.clamp(0.0, 1.0) }.bits() } else { bits }
    })
}

/// Bit by bit, `table` indexed by the bits of a, b and c, a's the highest.
fn logic(table: u8, a: u64, b: u64, c: u64) -> u64 {
    (0..8_u64).filter(|index| table >> index & 1 != 0).fold(0, |result, index| {
        let pick = |bit: u64, value: u64| if index >> bit & 1 != 0 { value } else { !value };
        result | pick(2, a) & pick(1, b) & pick(0, c)
    })
}
