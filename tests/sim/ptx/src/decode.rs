//! One instruction's text to what runs.

use crate::instruction::{Address, MapFn, Op, Product, Reg, ShuffleKind, Space, Special, VoteKind};
use crate::map::{comparison, conversions, map};
use crate::parse::{Builder, immediate};
use crate::scalar::WARP;
use crate::text::operands;
use crate::types::{Opcode, Type};

/// The predicate that an instruction runs under, and whether it is negated.
type Guard = (Reg, bool);

/// The guard and the steps of an instruction.
pub(crate) fn statement(builder: &mut Builder<'_>, text: &str) -> Result<(Option<Guard>, Vec<Op>), String> {
    let (guard, text) = match text.strip_prefix('@') {
        None => (None, text),
        Some(rest) => {
            let (name, rest) =
                rest.split_once(char::is_whitespace).ok_or("a guard without an instruction")?;
            let negate = name.starts_with('!');
            (Some((operand(builder, name.trim_start_matches('!'))?, negate)), rest.trim())
        }
    };
    let (name, rest) = text.split_once(char::is_whitespace).unwrap_or((text, ""));
    let opcode = Opcode::parse(name);
    let ops = instruction(builder, &opcode, &operands(rest)).map_err(|what| format!("{text:?}: {what}"))?;
    match opcode.unknown() {
        Some(modifier) => Err(format!("{text:?}: modifier .{modifier} is not supported")),
        None => Ok((guard, ops)),
    }
}

/// A register, literal, special register or address of a variable.
fn operand(builder: &mut Builder<'_>, text: &str) -> Result<Reg, String> {
    if text == "_" {
        return Ok(builder.fresh());
    }
    if let Some((reg, _)) = builder.register(text) {
        return Ok(reg);
    }
    if let Some(special) = special(text) {
        return Ok(builder.special(special));
    }
    if text == "WARP_SZ" {
        return Ok(builder.constant(WARP as u64));
    }
    let base = text.split('+').next().unwrap_or_default();
    match immediate(text) {
        Some(bits) => Ok(builder.constant(bits)),
        None if base == text => {
            builder.symbol(text).map(|(_, reg)| reg).ok_or_else(|| format!("operand {text:?} is not known"))
        }
        None => Err(format!("operand {text:?} is not supported")),
    }
}

fn special(text: &str) -> Option<Special> {
    let (name, axis) = text.split_once('.').unwrap_or((text, ""));
    let axis = "xyz".find(axis).filter(|_| axis.len() == 1);
    Some(match (name, axis) {
        ("%tid", Some(axis)) => Special::Thread(axis),
        ("%ntid", Some(axis)) => Special::BlockSize(axis),
        ("%ctaid", Some(axis)) => Special::Block(axis),
        ("%nctaid", Some(axis)) => Special::Grid(axis),
        ("%laneid", None) => Special::Lane,
        ("%warpid", None) => Special::Warp,
        ("%nwarpid", None) => Special::Warps,
        ("%dynamic_smem_size", None) => Special::DynamicShared,
        _ => Special::LaneMask(
            ["lt", "le", "eq", "ge", "gt"].into_iter().find(|kind| name == format!("%lanemask_{kind}"))?,
        ),
    })
}

/// `{a, b}` or a single operand.
fn vector(builder: &mut Builder<'_>, text: &str) -> Result<Vec<Reg>, String> {
    let inner = text.trim_start_matches('{').trim_end_matches('}');
    inner.split(',').map(|part| operand(builder, part.trim())).collect()
}

fn address(builder: &mut Builder<'_>, text: &str, space: Space) -> Result<Address, String> {
    let inner = text
        .strip_prefix('[')
        .and_then(|text| text.strip_suffix(']'))
        .ok_or_else(|| format!("{text:?} is no address"))?;
    let (base, offset) = match inner.split_once('+') {
        Some((base, offset)) => {
            (base.trim(), immediate(offset.trim()).ok_or_else(|| format!("offset of {text:?}"))? as i64)
        }
        None => (inner.trim(), 0),
    };
    if let Some((base, narrow)) = builder.register(base) {
        return Ok(Address { space, base, offset, narrow });
    }
    if let Some((found, base)) = builder.symbol(base) {
        return Ok(Address {
            space: if space == Space::Generic { found } else { space },
            base,
            offset,
            narrow: false,
        });
    }
    let base = operand(builder, base)?;
    Ok(Address { space, base, offset, narrow: false })
}

fn space(opcode: &Opcode<'_>) -> Space {
    match opcode.one_of(&["param", "const", "shared", "local", "global"]) {
        Some("param") => Space::Parameter,
        Some("const") => Space::Constant,
        Some("shared") => Space::Shared,
        Some("local") => Space::Local,
        Some(_) => Space::Global,
        None => Space::Generic,
    }
}

fn instruction(b: &mut Builder<'_>, opcode: &Opcode<'_>, x: &[&str]) -> Result<Vec<Op>, String> {
    let need = |count: usize| {
        if x.len() >= count { Ok(()) } else { Err(format!("expected {count} operands, found {}", x.len())) }
    };
    let op = match opcode.name {
        "bra" => {
            need(1)?;
            b.jumps.push((b.kernel.code.len(), vec![x[0].into()]));
            Op::Branch { target: 0 }
        }
        "brx" => {
            need(2)?;
            opcode.has("idx");
            b.jumps.push((b.kernel.code.len(), vec![x[1].into()]));
            Op::BranchTable { index: operand(b, x[0])?, targets: Vec::new() }
        }
        "ret" | "exit" => Op::Exit,
        "trap" => Op::Trap,
        "nop" | "nanosleep" | "prefetch" | "prefetchu" | "griddepcontrol" => return Ok(Vec::new()),
        "mov" if x.len() == 2 && x[1].starts_with('{') => {
            Op::Pack { to: operand(b, x[0])?, from: vector(b, x[1])?, bits: 8 * opcode.ty().size() as u32 }
        }
        "mov" if x.len() == 2 && x[0].starts_with('{') => {
            Op::Unpack { to: vector(b, x[0])?, from: operand(b, x[1])?, bits: 8 * opcode.ty().size() as u32 }
        }
        "cvt" => return convert(b, opcode, x),
        "cvta" => return convert_address(b, opcode, x),
        "setp" => return set_predicate(b, opcode, x),
        "lop3" => {
            need(5)?;
            let table = immediate(x[4]).ok_or("the table is not a literal")? as u8;
            Op::Logic {
                table,
                to: operand(b, x[0])?,
                from: [operand(b, x[1])?, operand(b, x[2])?, operand(b, x[3])?],
            }
        }
        "ld" | "ldu" => {
            need(2)?;
            opcode.one_of(&["v2", "v4", "v8"]);
            let space = space(opcode);
            let op = Op::Load { to: vector(b, x[0])?, address: address(b, x[1], space)?, ty: opcode.ty() };
            touches_shared(b, space, opcode.ty().size());
            op
        }
        "st" => {
            need(2)?;
            opcode.one_of(&["v2", "v4", "v8"]);
            let space = space(opcode);
            touches_shared(b, space, opcode.ty().size());
            Op::Store { address: address(b, x[0], space)?, from: vector(b, x[1])?, ty: opcode.ty() }
        }
        "atom" | "red" => atomic(b, opcode, x)?,
        "shfl" => {
            need(5)?;
            let kind = match opcode.one_of(&["idx", "up", "down", "bfly"]).ok_or("no kind of shuffle")? {
                "idx" => ShuffleKind::Index,
                "up" => ShuffleKind::Up,
                "down" => ShuffleKind::Down,
                _ => ShuffleKind::Butterfly,
            };
            let (to, valid) = two_results(b, x[0])?;
            let [value, lane, clamp, members] =
                [operand(b, x[1])?, operand(b, x[2])?, operand(b, x[3])?, operand(b, x[4])?];
            Op::Shuffle { kind, to, valid, value, lane, clamp, members }
        }
        "vote" => {
            need(3)?;
            let uniform = opcode.types.is_empty();
            let kind = match opcode.one_of(&["ballot", "all", "any"]) {
                Some("ballot") => VoteKind::Ballot,
                Some("all") => VoteKind::All,
                Some(_) => VoteKind::Any,
                None if !uniform => VoteKind::Uniform,
                None => return Err("no kind of vote".into()),
            };
            let (predicate, negate) = (x[1].trim_start_matches('!'), x[1].starts_with('!'));
            Op::Vote {
                kind,
                to: operand(b, x[0])?,
                predicate: operand(b, predicate)?,
                negate,
                members: operand(b, x[2])?,
            }
        }
        "redux" => {
            need(3)?;
            let f = operator(opcode, opcode.ty())?;
            Op::Reduce { f, to: operand(b, x[0])?, value: operand(b, x[1])?, members: operand(b, x[2])? }
        }
        "activemask" => Op::ActiveMask { to: operand(b, x[0])? },
        "bar" if opcode.has("warp") => Op::WarpBarrier { members: operand(b, x[0])? },
        "bar" | "barrier" => {
            if opcode.has("red") || opcode.has("cluster") {
                return Err("this barrier is not supported".into());
            }
            let id = operand(b, x.first().copied().unwrap_or("0"))?;
            let threads = x.get(1).map(|text| operand(b, text)).transpose()?;
            Op::Barrier { id, threads, waits: !opcode.has("arrive") }
        }
        "membar" | "fence" => {
            let device = opcode.one_of(&["gl", "sys", "gpu"]).is_some();
            opcode.has("sc");
            b.kernel.fences |= device;
            Op::Fence
        }
        "mma" => product(b, opcode, x)?,
        "ldmatrix" => {
            opcode.one_of(&["m8n8", "x1", "x2", "x4"]);
            need(2)?;
            space(opcode);
            Op::LoadMatrix {
                to: vector(b, x[0])?,
                address: address(b, x[1], Space::Shared)?,
                transpose: opcode.has("trans"),
            }
        }
        "cp" => copy(b, opcode, x)?,
        _ => {
            let f = map(opcode).ok_or("this instruction is not supported")?;
            return mapped(b, opcode, vec![f], x);
        }
    };
    Ok(vec![op])
}

/// Steps that compute the first operand from the others; each after the first goes on from the result so far.
fn mapped(
    b: &mut Builder<'_>,
    opcode: &Opcode<'_>,
    steps: Vec<MapFn>,
    x: &[&str],
) -> Result<Vec<Op>, String> {
    let (&to, from) = x.split_first().ok_or("no operands")?;
    if from.is_empty() || from.len() > 4 {
        return Err(format!("expected one to four sources, found {}", from.len()));
    }
    let to = operand(b, to)?;
    let mut sources = [0; 4];
    for (source, text) in sources.iter_mut().zip(from) {
        *source = operand(b, text)?;
    }
    let single = opcode.types.iter().all(|ty| *ty == Type::F32);
    let (flush, saturate) = (opcode.has("ftz") && single, opcode.has("sat") && single);
    let ops = steps.into_iter().enumerate().map(|(step, f)| {
        let from = if step == 0 { sources } else { [to, 0, 0, 0] };
        Op::Map { f, to, from, flush, saturate }
    });
    Ok(ops.collect())
}

fn convert(b: &mut Builder<'_>, opcode: &Opcode<'_>, x: &[&str]) -> Result<Vec<Op>, String> {
    match conversions(opcode) {
        steps if steps.is_empty() => Err("this conversion is not supported".into()),
        steps => mapped(b, opcode, steps, x),
    }
}

/// `cvta.to.shared` takes the window off a generic address, `cvta.shared` puts it on.
fn convert_address(b: &mut Builder<'_>, opcode: &Opcode<'_>, x: &[&str]) -> Result<Vec<Op>, String> {
    let window = space(opcode).window();
    let name = if opcode.has("to") { "sub.u64" } else { "add.u64" };
    let window = format!("{:#x}", window);
    let operands: Vec<_> = x.iter().copied().chain([window.as_str()]).collect();
    let add = Opcode::parse(name);
    mapped(b, &add, vec![map(&add).ok_or("no 64-bit sum")?], &operands)
}

/// `setp.lt.and.f32 p|q, a, b, c`: p = (a < b) and c, q = !(a < b) and c.
fn set_predicate(b: &mut Builder<'_>, opcode: &Opcode<'_>, x: &[&str]) -> Result<Vec<Op>, String> {
    const NAMES: &[&str] = &[
        "eq", "ne", "lt", "le", "gt", "ge", "lo", "ls", "hi", "hs", "equ", "neu", "ltu", "leu", "gtu", "geu",
        "num", "nan",
    ];
    let name = opcode.one_of(NAMES).ok_or("no comparison")?;
    let f = comparison(name, opcode.ty()).ok_or("this comparison is not supported")?;
    let (p, q) = x.first().ok_or("no operands")?.split_once('|').unwrap_or((x[0], "_"));
    let mut ops = mapped(b, opcode, vec![f], &[&[p][..], &x[1..x.len().min(3)]].concat())?;
    let predicate = |text: &str| map(&Opcode::parse(text)).ok_or("no predicates");
    let plain = |f, to, from: [Reg; 2]| Op::Map {
        f,
        to,
        from: [from[0], from[1], 0, 0],
        flush: false,
        saturate: false,
    };
    let (to, other) = (operand(b, p)?, operand(b, q)?);
    if q != "_" {
        ops.push(plain(predicate("not.pred")?, other, [to, 0]));
    }
    if let Some(combine) = opcode.one_of(&["and", "or", "xor"]) {
        let text = x.get(3).ok_or("no predicate to combine with")?;
        let mut with = operand(b, text.trim_start_matches('!'))?;
        if text.starts_with('!') {
            let negated = b.fresh();
            ops.insert(0, plain(predicate("not.pred")?, negated, [with, 0]));
            with = negated;
        } else if with == to || with == other {
            let copy = b.fresh();
            ops.insert(0, plain(predicate("mov.pred")?, copy, [with, 0]));
            with = copy;
        }
        let f = predicate(&format!("{combine}.pred"))?;
        ops.push(plain(f, to, [to, with]));
        if q != "_" {
            ops.push(plain(f, other, [other, with]));
        }
    }
    Ok(ops)
}

fn two_results(b: &mut Builder<'_>, text: &str) -> Result<(Reg, Reg), String> {
    let (first, second) = text.split_once('|').unwrap_or((text, "_"));
    Ok((operand(b, first)?, operand(b, second)?))
}

fn touches_shared(b: &mut Builder<'_>, space: Space, size: usize) {
    if matches!(space, Space::Shared | Space::Generic) {
        b.kernel.granule = b.kernel.granule.min(size);
    }
}

/// The function of an atomic or a reduction, from its modifier.
fn operator(opcode: &Opcode<'_>, ty: Type) -> Result<MapFn, String> {
    let name = opcode
        .one_of(&["add", "min", "max", "and", "or", "xor", "exch", "inc", "dec"])
        .ok_or("no operator")?;
    let inner = Opcode::of(name, ty);
    map(&inner).ok_or_else(|| format!("{name} is not supported for {ty:?}"))
}

fn atomic(b: &mut Builder<'_>, opcode: &Opcode<'_>, x: &[&str]) -> Result<Op, String> {
    let at = x.iter().position(|text| text.starts_with('[')).ok_or("no address")?;
    let operands = &x[at + 1..];
    let (ty, space) = (opcode.ty(), space(opcode));
    touches_shared(b, space, ty.size());
    let to = if at == 1 { operand(b, x[0])? } else { b.fresh() };
    let last = operand(b, operands.last().ok_or("no operand")?)?;
    let address = address(b, x[at], space)?;
    if opcode.has("cas") {
        let compare = Some(operand(b, operands[0])?);
        let f = map(&Opcode::of("exch", Type::U64)).ok_or("no exchange")?;
        return Ok(Op::Atomic { address, ty, f, to, operand: last, compare });
    }
    Ok(Op::Atomic { address, ty, f: operator(opcode, ty)?, to, operand: last, compare: None })
}

fn product(b: &mut Builder<'_>, opcode: &Opcode<'_>, x: &[&str]) -> Result<Op, String> {
    let shape =
        opcode.one_of(&["m16n8k4", "m16n8k8", "m16n8k16"]).ok_or("this shape of mma is not supported")?;
    let &[sum, ty, right, addend] = opcode.types.as_slice() else { return Err("expected four types".into()) };
    let depth = shape[5..].trim_start_matches('k').parse().map_err(|_| "no depth")?;
    let fits = match ty {
        Type::F16 | Type::Bf16 => depth >= 8,
        Type::Tf32 => depth <= 8,
        _ => false,
    };
    if !fits || right != ty || sum != Type::F32 || addend != Type::F32 {
        return Err("these types of mma are not supported".into());
    }
    let [to, a, bs, c] = x else { return Err(format!("expected 4 operands, found {}", x.len())) };
    let op = (vector(b, to)?, vector(b, a)?, vector(b, bs)?, vector(b, c)?);
    // Registers a lane: a's 16 rows and b's 8 columns, `depth` deep, over 32 lanes.
    let words = depth * ty.size().min(4) / if ty == Type::Tf32 { 4 } else { 2 };
    let expected = (
        4,
        16 * words / WARP / if ty == Type::Tf32 { 1 } else { 2 },
        8 * words / WARP / if ty == Type::Tf32 { 1 } else { 2 },
        4,
    );
    let found = (op.0.len(), op.1.len(), op.2.len(), op.3.len());
    if found != expected {
        return Err(format!("expected {expected:?} registers, found {found:?}"));
    }
    Ok(Op::Product { product: Product { depth, ty, sum }, to: op.0, a: op.1, b: op.2, c: op.3 })
}

fn copy(b: &mut Builder<'_>, opcode: &Opcode<'_>, x: &[&str]) -> Result<Op, String> {
    if !opcode.has("async") || opcode.has("bulk") || opcode.has("mbarrier") {
        return Err("this copy is not supported".into());
    }
    if opcode.has("commit_group") {
        return Ok(Op::CopyCommit);
    }
    if opcode.has("wait_all") {
        return Ok(Op::CopyWait { pending: None });
    }
    if opcode.has("wait_group") {
        let pending = x.first().and_then(|text| immediate(text)).ok_or("no number of groups")?;
        return Ok(Op::CopyWait { pending: Some(pending as usize) });
    }
    space(opcode);
    opcode.has("global");
    let &[to, from, size, ..] = x else { return Err("expected a target, a source and a size".into()) };
    let size = immediate(size).filter(|size| [4, 8, 16].contains(size)).ok_or("the size is not 4, 8 or 16")?
        as usize;
    let source = x.get(3).map(|text| operand(b, text)).transpose()?;
    b.kernel.granule = b.kernel.granule.min(size);
    Ok(Op::CopyAsync {
        to: address(b, to, Space::Shared)?,
        from: address(b, from, Space::Global)?,
        size,
        source,
    })
}
