//! PTX's types and instruction names with their modifiers.

use std::cell::Cell;

/// A PTX type; untyped bits count as unsigned.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Type {
    Predicate,
    U8,
    S8,
    U16,
    S16,
    U32,
    S32,
    U64,
    S64,
    F16,
    F16x2,
    Bf16,
    Bf16x2,
    Tf32,
    F32,
    F64,
    B128,
}

impl Type {
    pub(crate) fn parse(name: &str) -> Option<Self> {
        Some(match name {
            "pred" => Self::Predicate,
            "u8" | "b8" => Self::U8,
            "s8" => Self::S8,
            "u16" | "b16" => Self::U16,
            "s16" => Self::S16,
            "u32" | "b32" => Self::U32,
            "s32" => Self::S32,
            "u64" | "b64" => Self::U64,
            "s64" => Self::S64,
            "f16" => Self::F16,
            "f16x2" => Self::F16x2,
            "bf16" => Self::Bf16,
            "bf16x2" => Self::Bf16x2,
            "tf32" => Self::Tf32,
            "f32" => Self::F32,
            "f64" => Self::F64,
            "b128" => Self::B128,
            _ => return None,
        })
    }

    /// Bytes in memory.
    pub(crate) fn size(self) -> usize {
        match self {
            Self::Predicate | Self::U8 | Self::S8 => 1,
            Self::U16 | Self::S16 | Self::F16 | Self::Bf16 => 2,
            Self::U32 | Self::S32 | Self::F16x2 | Self::Bf16x2 | Self::Tf32 | Self::F32 => 4,
            Self::U64 | Self::S64 | Self::F64 => 8,
            Self::B128 => 16,
        }
    }

    pub(crate) fn is_signed(self) -> bool {
        matches!(self, Self::S8 | Self::S16 | Self::S32 | Self::S64)
    }

    pub(crate) fn is_integer(self) -> bool {
        self.is_signed() || matches!(self, Self::U8 | Self::U16 | Self::U32 | Self::U64)
    }
}

/// `shfl.sync.bfly.b32` taken apart. It remembers which modifiers were asked for, so that one that nobody knows is an error
/// and not silently dropped.
pub(crate) struct Opcode<'a> {
    pub(crate) name: &'a str,
    modifiers: Vec<(&'a str, Cell<bool>)>,
    /// The types among the modifiers, in order.
    pub(crate) types: Vec<Type>,
}

/// Modifiers that change nothing here: defaults, hints, and orders of memory that one thread's program order implies.
const WITHOUT_EFFECT: &[&str] = &[
    "rn",
    "approx",
    "full",
    "sync",
    "aligned",
    "uni",
    "lo",
    "noftz",
    "volatile",
    "relaxed",
    "acquire",
    "release",
    "acq_rel",
    "weak",
    "cta",
    "gpu",
    "sys",
    "cluster",
    "nc",
    "wrap",
    "L1",
    "L2",
    "cache_hint",
    "ca",
    "cg",
    "cs",
    "lu",
    "cv",
    "wb",
    "wt",
    "no_allocate",
    "evict_first",
    "evict_last",
    "evict_normal",
    "evict_unchanged",
    "64B",
    "128B",
    "256B",
    "row",
    "col",
    "b4e",
];

impl<'a> Opcode<'a> {
    pub(crate) fn parse(text: &'a str) -> Self {
        let mut parts = text.split(['.', ':']).filter(|part| !part.is_empty());
        let name = parts.next().unwrap_or_default();
        let (types, modifiers): (Vec<_>, Vec<_>) = parts.partition(|part| Type::parse(part).is_some());
        Self {
            name,
            modifiers: modifiers.into_iter().map(|part| (part, Cell::new(false))).collect(),
            types: types.into_iter().filter_map(Type::parse).collect(),
        }
    }

    /// An instruction of one type and no modifiers.
    pub(crate) fn of(name: &'a str, ty: Type) -> Self {
        Self { name, modifiers: Vec::new(), types: vec![ty] }
    }

    /// Whether `modifier` is there; asking makes it known.
    pub(crate) fn has(&self, modifier: &str) -> bool {
        let found = self.modifiers.iter().find(|(name, _)| *name == modifier);
        found.inspect(|(_, known)| known.set(true)).is_some()
    }

    /// The first of `modifiers` that is there.
    pub(crate) fn one_of(&self, modifiers: &[&'static str]) -> Option<&'static str> {
        modifiers.iter().copied().find(|modifier| self.has(modifier))
    }

    /// The type of an instruction with one; 32 bits if it names none.
    pub(crate) fn ty(&self) -> Type {
        self.types.first().copied().unwrap_or(Type::U32)
    }

    /// A modifier that nobody asked for and that has an effect.
    pub(crate) fn unknown(&self) -> Option<&'a str> {
        let mut left =
            self.modifiers.iter().filter(|(name, known)| !known.get() && !WITHOUT_EFFECT.contains(name));
        left.next().map(|(name, _)| *name)
    }
}
