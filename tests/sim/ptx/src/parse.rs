//! From items of text to kernels: variables, registers, labels, bodies. [`crate::decode`] does the single instruction.

use crate::Error;
use crate::decode;
use crate::instruction::{Instruction, Kernel, Op, Reg, Space, Special};
use crate::text::{Item, Located};
use crate::types::Type;
use std::collections::HashMap;

/// A module-level variable of constant or shared memory.
#[derive(Clone, Debug)]
pub(crate) struct Variable {
    space: Space,
    alignment: usize,
    /// Bytes; `None` is the dynamic shared memory.
    size: Option<usize>,
    /// Offset in the constants.
    offset: usize,
}

/// What a module's text holds.
#[derive(Default)]
pub(crate) struct Parsed {
    /// A kernel that uses what is not supported is an error only when it is launched.
    pub(crate) kernels: Vec<(String, Result<Kernel, Error>)>,
    pub(crate) constants: Vec<u8>,
}

/// Reads all items of a module.
pub(crate) fn parse(items: &[Located]) -> Result<Parsed, Error> {
    let mut parsed = Parsed::default();
    let mut variables = HashMap::new();
    let mut rest = items.iter();
    while let Some(located) = rest.next() {
        let fail = |what: String| Error::Text { line: located.line, what };
        match &located.item {
            Item::Statement(text) => declare(text, &mut variables, &mut parsed.constants).map_err(fail)?,
            Item::Entry(header) | Item::Function(header) => {
                let mut depth = 1;
                let body: Vec<_> = rest
                    .by_ref()
                    .take_while(|located| {
                        depth += match located.item {
                            Item::Open => 1,
                            Item::Close => -1,
                            _ => 0,
                        };
                        depth > 0
                    })
                    .collect();
                if let Item::Entry(_) = located.item {
                    let mut builder = Builder::new(header, &variables).map_err(fail)?;
                    let name = builder.kernel.name.clone();
                    parsed.kernels.push((name, builder.body(&body).map(|()| builder.kernel)));
                }
            }
            other => return Err(fail(format!("expected a declaration or a kernel, found {other:?}"))),
        }
    }
    Ok(parsed)
}

/// A module-level declaration such as `.const .align 4 .b8 levels[64] = {0, 128, …}`.
fn declare(
    text: &str,
    variables: &mut HashMap<String, Variable>,
    constants: &mut Vec<u8>,
) -> Result<(), String> {
    let words: Vec<_> = text.split_whitespace().collect();
    let space = match words.iter().find(|word| matches!(**word, ".const" | ".shared" | ".global")) {
        Some(&".const") => Space::Constant,
        Some(&".shared") => Space::Shared,
        Some(_) => return Ok(()), // Global variables are an error where a kernel names them.
        None if text.starts_with(".pragma") || text.starts_with(".func") || text.contains(".alias") => {
            return Ok(());
        }
        None => return Err(format!("expected a declaration, found {text:?}")),
    };
    let (name, alignment, ty, count) = variable(text)?;
    let size = count.map(|count| count * ty.size());
    let offset = constants.len().next_multiple_of(alignment);
    if space == Space::Constant {
        let size = size.ok_or_else(|| format!("constant {name} has no size"))?;
        constants.resize(offset + size, 0);
        for (index, value) in initial_values(text)?.iter().enumerate() {
            let at = offset + index * ty.size();
            constants[at..at + ty.size()].copy_from_slice(&value.to_le_bytes()[..ty.size()]);
        }
    }
    variables.insert(name, Variable { space, alignment, size, offset });
    Ok(())
}

/// Name, alignment, type and number of elements of a declared variable.
fn variable(text: &str) -> Result<(String, usize, Type, Option<usize>), String> {
    let declaration = text.split('=').next().unwrap_or_default();
    let words: Vec<_> = declaration.split_whitespace().collect();
    let ty = words
        .iter()
        .rev()
        .find_map(|word| Type::parse(word.strip_prefix('.')?))
        .ok_or_else(|| format!("no type in {text:?}"))?;
    let align =
        words.iter().position(|word| *word == ".align").and_then(|at| words.get(at + 1)?.parse().ok());
    let last = words.last().copied().unwrap_or_default();
    let (name, count) = match last.split_once('[') {
        None => (last, Some(1)),
        Some((name, "]")) => (name, None),
        Some((name, count)) => {
            let count = count.split(['[', ']']).filter(|part| !part.is_empty()).map(str::parse::<usize>);
            (name, Some(count.product::<Result<_, _>>().map_err(|_| format!("no size in {text:?}"))?))
        }
    };
    Ok((name.into(), align.unwrap_or(ty.size()), ty, count))
}

fn initial_values(text: &str) -> Result<Vec<u64>, String> {
    let Some((_, values)) = text.split_once('=') else { return Ok(Vec::new()) };
    let values = values.trim().trim_start_matches('{').trim_end_matches('}').split(',').map(str::trim);
    values
        .filter(|value| !value.is_empty())
        .map(|value| immediate(value).ok_or_else(|| format!("initial value {value:?}")))
        .collect()
}

/// A literal's bits: `7`, `-1`, `0x10`, `0f3F800000`, `0d…`.
pub(crate) fn immediate(text: &str) -> Option<u64> {
    let digits = text.trim_end_matches('U');
    let float = digits
        .strip_prefix("0f")
        .or(digits.strip_prefix("0F"))
        .or(digits.strip_prefix("0d"))
        .or(digits.strip_prefix("0D"));
    if let Some(bits) = float.or(digits.strip_prefix("0x")) {
        return u64::from_str_radix(bits, 16).ok();
    }
    digits.parse::<i64>().map(|value| value as u64).or(digits.parse()).ok()
}

/// A kernel while its body is read.
pub(crate) struct Builder<'a> {
    pub(crate) kernel: Kernel,
    variables: &'a HashMap<String, Variable>,
    /// Registers and local variables by name, inner scopes last. A register is numbered when it is first used.
    scopes: Vec<HashMap<String, Reg>>,
    /// Offsets of parameters, and of shared and local variables once they are used.
    symbols: HashMap<String, (Space, u64)>,
    /// 32-bit registers, for addresses.
    narrow: Vec<HashMap<String, bool>>,
    constants: HashMap<u64, Reg>,
    specials: Vec<(Reg, Special)>,
    labels: HashMap<String, usize>,
    tables: HashMap<String, Vec<String>>,
    /// Branches and the labels that they go to, to be resolved at the end.
    pub(crate) jumps: Vec<(usize, Vec<String>)>,
}

impl<'a> Builder<'a> {
    fn new(header: &str, variables: &'a HashMap<String, Variable>) -> Result<Self, String> {
        let after = header.split(".entry").nth(1).unwrap_or_default().trim();
        let (name, rest) =
            after.split_once('(').unwrap_or((after.split_whitespace().next().unwrap_or_default(), ")"));
        let (list, directives) = rest.split_once(')').ok_or("parameters without an end")?;
        let (mut parameters, mut symbols, mut end) = (Vec::new(), HashMap::new(), 0_usize);
        for text in list.split(',').map(str::trim).filter(|text| !text.is_empty()) {
            let (name, alignment, ty, count) = variable(text)?;
            let size = ty.size() * count.unwrap_or(1);
            let offset = end.next_multiple_of(alignment);
            parameters.push((offset, size));
            symbols.insert(name, (Space::Parameter, offset as u64));
            end = offset + size;
        }
        let limit =
            [".maxntid", ".reqntid"].iter().find_map(|name| directives.split_once(name)).map(|(_, sizes)| {
                let sizes = sizes.split('.').next().unwrap_or_default().split(',');
                sizes.filter_map(|size| size.trim().parse::<u32>().ok()).product()
            });
        let kernel = Kernel {
            name: name.trim().into(),
            parameters,
            code: Vec::new(),
            registers: 1, // Register 0 is every unused operand.
            constants: vec![(0, 0)],
            specials: Vec::new(),
            shared_bytes: 0,
            local_bytes: 0,
            granule: 16,
            max_threads: limit,
            fences: false,
        };
        Ok(Self {
            kernel,
            variables,
            scopes: vec![HashMap::new()],
            narrow: vec![HashMap::new()],
            symbols,
            constants: HashMap::from([(0, 0)]),
            specials: Vec::new(),
            labels: HashMap::new(),
            tables: HashMap::new(),
            jumps: Vec::new(),
        })
    }

    fn body(&mut self, items: &[&Located]) -> Result<(), Error> {
        let mut last_label = String::new();
        for located in items {
            let fail = |what: String| Error::Text { line: located.line, what };
            match &located.item {
                Item::Open => {
                    self.scopes.push(HashMap::new());
                    self.narrow.push(HashMap::new());
                }
                Item::Close => {
                    self.scopes.pop();
                    self.narrow.pop();
                }
                Item::Label(name) => {
                    last_label.clone_from(name);
                    self.labels.insert(name.clone(), self.kernel.code.len());
                }
                Item::Statement(text) if text.starts_with(".reg") => self.registers(text).map_err(fail)?,
                Item::Statement(text) if text.starts_with(".branchtargets") => {
                    let targets =
                        text[".branchtargets".len()..].split(',').map(|target| target.trim().to_string());
                    self.tables.insert(last_label.clone(), targets.collect());
                }
                Item::Statement(text) if text.starts_with(".local") || text.starts_with(".shared") => {
                    let (name, alignment, ty, count) = variable(text).map_err(fail)?;
                    let size = count.unwrap_or(0) * ty.size();
                    let space = if text.starts_with(".local") { Space::Local } else { Space::Shared };
                    self.place(name, space, alignment, size);
                }
                Item::Statement(text) if text.starts_with(".pragma") => {}
                Item::Statement(text) => {
                    let (guard, ops) = decode::statement(self, text).map_err(fail)?;
                    let place = located.place;
                    self.kernel.code.extend(ops.into_iter().map(|op| Instruction { guard, op, place }));
                }
                other => return Err(fail(format!("unexpected {other:?} in a kernel"))),
            }
        }
        let place = items.last().map(|located| located.place).unwrap_or_default();
        self.kernel.code.push(Instruction { guard: None, op: Op::Exit, place });
        self.kernel.specials = std::mem::take(&mut self.specials);
        self.resolve()
            .map_err(|what| Error::Text { line: items.last().map_or(0, |located| located.line), what })
    }

    /// `.reg .b32 %r<86>` or `.reg .b16 low, high`: names become known, numbers come with use.
    fn registers(&mut self, text: &str) -> Result<(), String> {
        let mut words = text.split_whitespace().skip(1);
        let ty = words
            .next()
            .and_then(|word| Type::parse(word.strip_prefix('.')?))
            .ok_or_else(|| format!("no type in {text:?}"))?;
        for name in words.collect::<String>().split(',') {
            let names = match name.split_once('<') {
                None => vec![name.to_string()],
                Some((prefix, count)) => {
                    let count: usize =
                        count.trim_end_matches('>').parse().map_err(|_| format!("no count in {text:?}"))?;
                    (0..count).map(|index| format!("{prefix}{index}")).collect()
                }
            };
            self.narrow
                .last_mut()
                .ok_or("a register outside of a body")?
                .extend(names.into_iter().map(|name| (name, ty.size() < 8)));
        }
        Ok(())
    }

    fn place(&mut self, name: String, space: Space, alignment: usize, size: usize) -> u64 {
        let end =
            if space == Space::Local { &mut self.kernel.local_bytes } else { &mut self.kernel.shared_bytes };
        let offset = end.next_multiple_of(alignment);
        *end = offset + size;
        self.symbols.insert(name, (space, offset as u64));
        offset as u64
    }

    fn resolve(&mut self) -> Result<(), String> {
        for (at, names) in std::mem::take(&mut self.jumps) {
            let find =
                |name: &String| self.labels.get(name).copied().ok_or_else(|| format!("no label {name}"));
            match &mut self.kernel.code[at].op {
                Op::Branch { target } => *target = find(&names[0])?,
                Op::BranchTable { targets, .. } => {
                    let table = self
                        .tables
                        .get(&names[0])
                        .ok_or_else(|| format!("no .branchtargets {}", names[0]))?;
                    *targets = table.iter().map(find).collect::<Result<_, _>>()?;
                }
                other => return Err(format!("{other:?} does not branch")),
            }
        }
        Ok(())
    }

    pub(crate) fn fresh(&mut self) -> Reg {
        self.kernel.registers += 1;
        self.kernel.registers - 1
    }

    pub(crate) fn constant(&mut self, bits: u64) -> Reg {
        if let Some(&reg) = self.constants.get(&bits) {
            return reg;
        }
        let reg = self.fresh();
        self.constants.insert(bits, reg);
        self.kernel.constants.push((reg, bits));
        reg
    }

    pub(crate) fn special(&mut self, special: Special) -> Reg {
        if let Some((reg, _)) = self.specials.iter().find(|(_, known)| *known == special) {
            return *reg;
        }
        let reg = self.fresh();
        self.specials.push((reg, special));
        reg
    }

    /// The register of a name that `.reg` declared, and whether it is narrower than 64 bits.
    pub(crate) fn register(&mut self, name: &str) -> Option<(Reg, bool)> {
        let depth = self.narrow.iter().rposition(|scope| scope.contains_key(name))?;
        let narrow = self.narrow[depth][name];
        if let Some(&reg) = self.scopes[depth].get(name) {
            return Some((reg, narrow));
        }
        let reg = self.fresh();
        self.scopes[depth].insert(name.into(), reg);
        Some((reg, narrow))
    }

    /// The space and the register that holds the address of a parameter or variable.
    pub(crate) fn symbol(&mut self, name: &str) -> Option<(Space, Reg)> {
        if let Some(&(space, offset)) = self.symbols.get(name) {
            return Some((space, self.constant(offset)));
        }
        let Variable { space, alignment, size, offset } = self.variables.get(name)?.clone();
        Some(match (space, size) {
            (Space::Shared, None) => (space, self.special(Special::DynamicStart)),
            (Space::Shared, Some(size)) => {
                let offset = self.place(name.into(), space, alignment, size);
                (space, self.constant(offset))
            }
            _ => (space, self.constant(offset as u64)),
        })
    }
}
