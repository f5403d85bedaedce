//! One block: its warps take turns, each running until all its lanes wait or have ended.

use crate::instruction::{Kernel, Place, Reg, Special};
use crate::memory::Memory;
use crate::scalar::{Lanes, WARP};
use crate::shared::Shared;
use crate::touched::Touched;
use crate::warp::{Arrival, Warp};
use crate::{FaultKind, Launch, Problem};

/// Everything that the instructions of a block reach.
pub(crate) struct Block<'a> {
    pub(crate) kernel: &'a Kernel,
    pub(crate) launch: &'a Launch<'a>,
    /// `blockIdx`.
    pub(crate) index: [u32; 3],
    pub(crate) parameters: &'a [u8],
    pub(crate) constants: &'a [u8],
    pub(crate) shared: Shared,
    pub(crate) memory: &'a mut dyn Memory,
    pub(crate) touched: &'a mut Touched,
    /// Warp instructions that may still run.
    pub(crate) left: &'a mut u64,
}

/// A problem, where it is and whose warp's.
pub(crate) struct Located {
    pub(crate) problem: Problem,
    pub(crate) place: Place,
    pub(crate) warp: usize,
}

impl Block<'_> {
    pub(crate) fn threads(&self) -> usize {
        self.launch.block.iter().product::<u32>() as usize
    }

    /// Runs all warps to their end, in an order that `random` picks anew each round.
    pub(crate) fn run(&mut self, random: &mut fastrand::Rng) -> Result<(), Located> {
        let mut warps: Vec<_> = (0..self.threads().div_ceil(WARP)).map(|index| self.warp(index)).collect();
        let mut order: Vec<_> = (0..warps.len()).collect();
        while warps.iter().any(|warp| warp.alive != 0) {
            if self.launch.seed != 0 {
                random.shuffle(&mut order);
            }
            for &index in &order {
                if warps[index].can_run() {
                    warps[index].run(self)?;
                }
            }
            self.release(&mut warps)?;
        }
        Ok(())
    }

    /// Lets go the barriers at which everybody is.
    fn release(&mut self, warps: &mut [Warp]) -> Result<(), Located> {
        let arrivals: Vec<_> = warps.iter().filter_map(|warp| warp.arrival).collect();
        let mut released = warps.iter().all(|warp| warp.alive == 0);
        for arrival in arrivals {
            let Arrival { id, threads, .. } = arrival;
            let here: Vec<_> = (0..warps.len())
                .filter(|&index| warps[index].arrival.is_some_and(|other| other.id == id))
                .collect();
            let arrived: u32 = here.iter().map(|&index| warps[index].alive.count_ones()).sum();
            let expected = threads.unwrap_or_else(|| warps.iter().map(|warp| warp.alive.count_ones()).sum());
            if !here.is_empty() && arrived >= expected {
                here.iter().for_each(|&index| warps[index].arrival = None);
                self.shared.barrier(&here);
                released = true;
            }
        }
        if released || warps.iter().any(Warp::can_run) {
            return Ok(());
        }
        let (index, arrival) = warps
            .iter()
            .enumerate()
            .find_map(|(index, warp)| Some((index, warp.arrival?)))
            .expect("somebody waits");
        let what =
            format!("warp {index} waits at barrier {} for ever: the other warps wait elsewhere", arrival.id);
        Err(Located { problem: Problem::new(FaultKind::Deadlock, what), place: arrival.place, warp: index })
    }

    fn warp(&self, index: usize) -> Warp {
        let first = index * WARP;
        let lanes = (self.threads() - first).min(WARP);
        // What a kernel reads without having written it should at least look wrong.
        let mut registers = vec![[u64::from_le_bytes([crate::Heap::POISON; 8]); WARP]; self.kernel.registers];
        for &(reg, bits) in &self.kernel.constants {
            registers[reg] = [bits; WARP];
        }
        for (reg, special) in &self.kernel.specials {
            let reg: Reg = *reg;
            registers[reg] = self.special(special, first);
        }
        Warp::new(index, lanes, registers, self.kernel.local_bytes)
    }

    fn special(&self, special: &Special, first: usize) -> Lanes {
        let block = self.launch.block;
        let thread = |lane: usize| thread_index(first + lane, block);
        std::array::from_fn(|lane| {
            u64::from(match *special {
                Special::Thread(axis) => thread(lane)[axis],
                Special::BlockSize(axis) => block[axis],
                Special::Block(axis) => self.index[axis],
                Special::Grid(axis) => self.launch.grid[axis],
                Special::Lane => lane as u32,
                Special::Warp => (first / WARP) as u32,
                Special::Warps => self.threads().div_ceil(WARP) as u32,
                Special::LaneMask("lt") => (1 << lane) - 1,
                Special::LaneMask("le") => ((2_u64 << lane) - 1) as u32,
                Special::LaneMask("eq") => 1 << lane,
                Special::LaneMask("ge") => !((1 << lane) - 1),
                Special::LaneMask(_) => !((2_u64 << lane) - 1) as u32,
                Special::DynamicShared => self.launch.shared_bytes as u32,
                Special::DynamicStart => self.kernel.shared_bytes.next_multiple_of(16) as u32,
            })
        })
    }
}

/// `threadIdx` of a thread's number.
pub(crate) fn thread_index(thread: usize, block: [u32; 3]) -> [u32; 3] {
    let thread = thread as u32;
    [thread % block[0], thread / block[0] % block[1], thread / (block[0] * block[1])]
}
