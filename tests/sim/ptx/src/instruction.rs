//! What a kernel is made of once it is decoded. Constants, special registers and addresses of variables are registers too,
//! filled before a warp starts, so that an operand is always a register.

use crate::scalar::Lanes;
use crate::types::Type;

/// Index of a register.
pub(crate) type Reg = usize;

/// Computes one register from up to four, all lanes at once; lanes that are not active are computed too and then dropped.
pub(crate) type MapFn = fn(&[&Lanes; 4]) -> Lanes;

/// Where an address lies.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Space {
    Parameter,
    Constant,
    Shared,
    Local,
    Global,
    /// By the address: each of the other spaces has a window.
    Generic,
}

impl Space {
    /// What is added to an address of this space to make it a generic one.
    pub(crate) fn window(self) -> u64 {
        match self {
            Self::Shared => 1 << 56,
            Self::Local => 2 << 56,
            Self::Constant => 3 << 56,
            Self::Parameter => 4 << 56,
            Self::Global | Self::Generic => 0,
        }
    }

    /// The space and the address in it of a generic address.
    pub(crate) fn of_generic(address: u64) -> (Self, u64) {
        let spaces = [Self::Shared, Self::Local, Self::Constant, Self::Parameter];
        let space =
            spaces.into_iter().find(|space| space.window() >> 56 == address >> 56).unwrap_or(Self::Global);
        (space, address - space.window())
    }
}

/// `[base + offset]` in a space.
#[derive(Clone, Debug)]
pub(crate) struct Address {
    pub(crate) space: Space,
    pub(crate) base: Reg,
    pub(crate) offset: i64,
    /// The base is a 32-bit register: its upper half is cut off.
    pub(crate) narrow: bool,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum ShuffleKind {
    Index,
    Up,
    Down,
    Butterfly,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum VoteKind {
    All,
    Any,
    Uniform,
    Ballot,
}

/// What an `mma.sync` multiplies: 16 rows, 8 columns, `depth` deep.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Product {
    pub(crate) depth: usize,
    pub(crate) ty: Type,
    /// The accumulator, f32 or f16.
    pub(crate) sum: Type,
}

#[derive(Clone, Debug)]
pub(crate) enum Op {
    Map {
        f: MapFn,
        to: Reg,
        from: [Reg; 4],
        flush: bool,
        saturate: bool,
    },
    /// `d = table(a, b, c)`, bit by bit.
    Logic {
        table: u8,
        to: Reg,
        from: [Reg; 3],
    },
    Pack {
        to: Reg,
        from: Vec<Reg>,
        bits: u32,
    },
    Unpack {
        to: Vec<Reg>,
        from: Reg,
        bits: u32,
    },
    Branch {
        target: usize,
    },
    BranchTable {
        index: Reg,
        targets: Vec<usize>,
    },
    Exit,
    Trap,
    Load {
        address: Address,
        ty: Type,
        to: Vec<Reg>,
    },
    Store {
        address: Address,
        ty: Type,
        from: Vec<Reg>,
    },
    /// `f(old, operand)`; a compare-and-swap stores `operand` where the old value equals `compare`.
    Atomic {
        address: Address,
        ty: Type,
        f: MapFn,
        to: Reg,
        operand: Reg,
        compare: Option<Reg>,
    },
    Shuffle {
        kind: ShuffleKind,
        to: Reg,
        valid: Reg,
        value: Reg,
        lane: Reg,
        clamp: Reg,
        members: Reg,
    },
    Vote {
        kind: VoteKind,
        to: Reg,
        predicate: Reg,
        negate: bool,
        members: Reg,
    },
    Reduce {
        f: MapFn,
        to: Reg,
        value: Reg,
        members: Reg,
    },
    ActiveMask {
        to: Reg,
    },
    WarpBarrier {
        members: Reg,
    },
    Barrier {
        id: Reg,
        threads: Option<Reg>,
        waits: bool,
    },
    Fence,
    Product {
        product: Product,
        to: Vec<Reg>,
        a: Vec<Reg>,
        b: Vec<Reg>,
        c: Vec<Reg>,
    },
    LoadMatrix {
        to: Vec<Reg>,
        address: Address,
        transpose: bool,
    },
    CopyAsync {
        to: Address,
        from: Address,
        size: usize,
        source: Option<Reg>,
    },
    CopyCommit,
    /// Waits until all but the newest `pending` groups of the lane have landed; `None` waits for those not committed too.
    CopyWait {
        pending: Option<usize>,
    },
}

/// Source file and line, by `.loc`.
#[derive(Clone, Copy, Default, PartialEq, Eq, Debug)]
pub(crate) struct Place {
    pub(crate) file: u32,
    pub(crate) line: u32,
}

#[derive(Clone, Debug)]
pub(crate) struct Instruction {
    /// Runs in the lanes where the predicate, negated or not, holds.
    pub(crate) guard: Option<(Reg, bool)>,
    pub(crate) op: Op,
    pub(crate) place: Place,
}

/// A register whose value is known only at launch.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum Special {
    /// `tid`, `ntid`, `ctaid`, `nctaid` and the axis.
    Thread(usize),
    BlockSize(usize),
    Block(usize),
    Grid(usize),
    Lane,
    Warp,
    Warps,
    /// Lanes before (`lt`), up to (`le`), at (`eq`), from (`ge`) and after (`gt`) the own one.
    LaneMask(&'static str),
    DynamicShared,
    /// Address of the dynamic shared memory, behind the static variables.
    DynamicStart,
}

/// One `.entry`, decoded.
#[derive(Clone, Debug)]
pub(crate) struct Kernel {
    pub(crate) name: String,
    /// Offset and size of each parameter, in bytes.
    pub(crate) parameters: Vec<(usize, usize)>,
    pub(crate) code: Vec<Instruction>,
    pub(crate) registers: usize,
    pub(crate) constants: Vec<(Reg, u64)>,
    pub(crate) specials: Vec<(Reg, Special)>,
    /// Bytes of static shared memory, and of local memory a thread.
    pub(crate) shared_bytes: usize,
    pub(crate) local_bytes: usize,
    /// Bytes of the narrowest access to shared memory: its races are tracked in units of this size.
    pub(crate) granule: usize,
    /// Threads a block at most, by `.maxntid` or `.reqntid`.
    pub(crate) max_threads: Option<u32>,
    /// Its blocks order their accesses themselves, by fences.
    pub(crate) fences: bool,
}
