//! Random programs over several streams: a list of steps that its seed alone decides.

use ebbtide_kernels::{
    Category, DType, Device, Error, FILE_ALIGNMENT, FileSlice, HostBuffer, Op, Slice, SpillFile,
    SpillOptions, Stream,
    op::{Dropout, GeluKind},
};

/// Buffers, host buffers and streams of a program.
const BUFFERS: usize = 5;
const HOSTS: usize = 3;
pub(crate) const STREAMS: usize = 4;
/// Parts of a file that host buffers are written to.
const SLOTS: usize = 2;
/// Elements of a buffer: parts of it are what ops touch.
const LEN: usize = 24;
const STEPS: usize = 24;

/// A part of a buffer: its index and a range of elements.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Part {
    buffer: usize,
    start: usize,
    len: usize,
}

#[derive(Clone, Debug)]
pub(crate) enum Step {
    Fill {
        out: Part,
        value: f32,
    },
    Copy {
        input: Part,
        out: Part,
    },
    Add {
        input: Part,
        out: Part,
    },
    Gelu {
        input: Part,
        out: Part,
    },
    Drop {
        data: Part,
        site: u32,
    },
    Out {
        input: Part,
        host: usize,
    },
    In {
        host: usize,
        out: Part,
    },
    /// A host buffer goes to a slot of the file.
    Spill {
        host: usize,
        slot: usize,
    },
    /// A slot comes back.
    Unspill {
        slot: usize,
        host: usize,
    },
    /// The buffer is freed, and another takes its place, most likely in the same memory.
    Replace {
        buffer: usize,
        value: f32,
    },
    /// The host reads a host buffer in the middle of the program.
    HostRead {
        host: usize,
    },
    /// The host writes a host buffer in the middle of the program.
    HostWrite {
        host: usize,
        value: f32,
    },
}

/// For each step the stream that it goes to.
#[derive(Clone, Debug)]
pub(crate) struct Program {
    pub(crate) steps: Vec<(usize, Step)>,
    /// Whether it has a file.
    files: bool,
}

pub(crate) fn program(seed: u64, files: bool) -> Program {
    let mut random = fastrand::Rng::with_seed(seed);
    let mut steps = Vec::new();
    while steps.len() < STEPS {
        let stream = random.usize(..STREAMS);
        let len = random.usize(1..=LEN);
        let mut part = || Part { buffer: random.usize(..BUFFERS), start: random.usize(..=LEN - len), len };
        let (a, b) = (part(), part());
        let overlap = a.buffer == b.buffer && a.start < b.start + len && b.start < a.start + len;
        let (host, value) = (random.usize(..HOSTS), random.f32());
        let step = match random.u8(..if files { 20 } else { 16 }) {
            0 => Step::Fill { out: a, value },
            1..=3 if !overlap => Step::Copy { input: a, out: b },
            4..=6 if !overlap => Step::Add { input: a, out: b },
            7..=8 if !overlap => Step::Gelu { input: a, out: b },
            9 => Step::Drop { data: a, site: steps.len() as u32 },
            10..=11 => Step::Out { input: a, host },
            12..=13 => Step::In { host, out: a },
            14 => Step::Replace { buffer: a.buffer, value },
            15 if random.bool() => Step::HostRead { host },
            15 => Step::HostWrite { host, value },
            16..=17 => Step::Spill { host, slot: random.usize(..SLOTS) },
            18..=19 => Step::Unspill { slot: random.usize(..SLOTS), host },
            _ => continue,
        };
        steps.push((stream, step));
    }
    Program { steps, files }
}

/// What a program leaves: every buffer, every host buffer, and what the host read on the way.
pub(crate) type Outcome = Vec<Vec<u32>>;

struct Machine {
    device: Device,
    streams: Vec<Stream>,
    buffers: Vec<Slice>,
    hosts: Vec<HostBuffer>,
    file: Option<SpillFile>,
}

impl Machine {
    /// What a program runs on.
    fn new(device: Device, streams: usize, files: bool) -> Result<Self, Error> {
        let streams: Vec<Stream> = (0..streams).map(|i| device.stream(&format!("s{i}"))).collect();
        let buffers =
            (0..BUFFERS).map(|i| Self::buffer(&device, &streams[0], i as f32)).collect::<Result<_, _>>()?;
        let host_bytes = if files { FILE_ALIGNMENT } else { 4 * LEN };
        let hosts: Vec<HostBuffer> =
            (0..HOSTS).map(|_| device.host_buffer(host_bytes, "host")).collect::<Result<_, _>>()?;
        let options =
            SpillOptions { folder: std::env::temp_dir(), bytes: SLOTS * FILE_ALIGNMENT, verify: false };
        let file = files.then(|| device.spill_file(&options)).transpose()?;
        let machine = Machine { device, streams, buffers, hosts, file };
        for slot in (0..SLOTS).filter(|_| files) {
            machine.streams[0]
                .submit(Op::WriteFile { input: machine.hosts[0].all(), file: machine.slot(slot)? })?;
        }
        Ok(machine)
    }

    fn buffer(device: &Device, stream: &Stream, value: f32) -> Result<Slice, Error> {
        let out = device.alloc(LEN, DType::F32, Category::Activations, "buffer")?;
        stream.submit(Op::Fill { out: out.clone(), value })?;
        Ok(out)
    }

    fn part(&self, part: Part) -> Result<Slice, Error> {
        self.buffers[part.buffer].part(part.start..part.start + part.len)
    }

    fn slot(&self, slot: usize) -> Result<FileSlice, Error> {
        let start = slot * FILE_ALIGNMENT;
        self.file.as_ref().expect("a program with a file").part(start..start + FILE_ALIGNMENT)
    }

    fn run(mut self, program: &Program) -> Result<Outcome, Error> {
        let mut outcome = Vec::new();
        for (stream, step) in &program.steps {
            let stream = self.streams[stream % self.streams.len()].clone();
            match *step {
                Step::Fill { out, value } => stream.submit(Op::Fill { out: self.part(out)?, value })?,
                Step::Copy { input, out } => {
                    stream.submit(Op::Copy { input: self.part(input)?, out: self.part(out)? })?;
                }
                Step::Add { input, out } => {
                    stream.submit(Op::Add { input: self.part(input)?, out: self.part(out)? })?;
                }
                Step::Gelu { input, out } => {
                    let (input, out) = (self.part(input)?, self.part(out)?);
                    stream.submit(Op::Gelu { input, out, kind: GeluKind::Tanh })?;
                }
                Step::Drop { data, site } => {
                    let dropout = Dropout { probability: 0.3, seed: 1, site, step: 1 };
                    stream.submit(Op::Dropout { data: self.part(data)?, dropout })?;
                }
                Step::Out { input, host } => {
                    let out = self.hosts[host].part(4 * input.start..4 * (input.start + input.len))?;
                    stream.submit(Op::CopyOut { input: self.part(input)?, out })?;
                }
                Step::In { host, out } => {
                    let input = self.hosts[host].part(4 * out.start..4 * (out.start + out.len))?;
                    stream.submit(Op::CopyIn { input, out: self.part(out)? })?;
                }
                Step::Spill { host, slot } => {
                    stream.submit(Op::WriteFile { input: self.hosts[host].all(), file: self.slot(slot)? })?;
                }
                Step::Unspill { slot, host } => {
                    stream.submit(Op::ReadFile { file: self.slot(slot)?, out: self.hosts[host].all() })?;
                }
                Step::Replace { buffer, value } => {
                    // The old one goes first, so that its memory is what the new one gets.
                    let none = self.buffers[buffer].part(0..0)?;
                    self.buffers[buffer] = none;
                    self.buffers[buffer] = Self::buffer(&self.device, &stream, value)?;
                }
                Step::HostRead { host } => outcome.push(self.hosts[host].all().to_vec::<u32>()?),
                Step::HostWrite { host, value } => {
                    self.hosts[host].all().write(|bytes| {
                        bytes.chunks_exact_mut(4).for_each(|b| b.copy_from_slice(&value.to_le_bytes()));
                    })?;
                }
            }
        }
        for buffer in &self.buffers {
            outcome.push(self.streams[0].download::<f32>(buffer)?.iter().map(|x| x.to_bits()).collect());
        }
        for host in &self.hosts {
            outcome.push(host.all().to_vec::<u32>()?);
        }
        self.device.synchronize()?;
        Ok(outcome)
    }
}

/// Runs a program on so many streams of a device.
pub(crate) fn run(device: Device, streams: usize, program: &Program) -> Result<Outcome, Error> {
    Machine::new(device, streams, program.files)?.run(program)
}
