//! Random programs over several streams, under every kind of schedule.
//!
//! A program is a list of steps that its seed alone decides. The host knows what each buffer holds after the steps in order;
//! the simulated device runs them on several streams in an order that its own seed decides, with freed memory poisoned,
//! and must give the same bits. As a negative control the derived waits are left out, and it must notice.

use ebbtide_kernels::{
    Category, DType, Device, DropWaits, Error, HostBuffer, Op, SimOptions, Slice, Stream,
    op::{Dropout, GeluKind},
};

/// Schedules of the positive test.
const SCHEDULES: u64 = 20_000;
/// Buffers, host buffers and streams of a program.
const BUFFERS: usize = 5;
const HOSTS: usize = 3;
const STREAMS: usize = 4;
/// Elements of a buffer: parts of it are what ops touch.
const LEN: usize = 24;
const STEPS: usize = 24;

/// A part of a buffer: its index and a range of elements.
#[derive(Clone, Copy, Debug)]
struct Part {
    buffer: usize,
    start: usize,
    len: usize,
}

#[derive(Clone, Debug)]
enum Step {
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

/// A program: for each step the stream that it goes to.
fn program(seed: u64) -> Vec<(usize, Step)> {
    let mut random = fastrand::Rng::with_seed(seed);
    let mut steps = Vec::new();
    while steps.len() < STEPS {
        let stream = random.usize(..STREAMS);
        let len = random.usize(1..=LEN);
        let mut part = || Part { buffer: random.usize(..BUFFERS), start: random.usize(..=LEN - len), len };
        let (a, b) = (part(), part());
        let overlap = a.buffer == b.buffer && a.start < b.start + len && b.start < a.start + len;
        let (host, value) = (random.usize(..HOSTS), random.f32());
        let step = match random.u8(..16) {
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
            _ => continue,
        };
        steps.push((stream, step));
    }
    steps
}

/// What a program leaves: every buffer, every host buffer, and what the host read on the way.
type Outcome = Vec<Vec<u32>>;

struct Machine {
    device: Device,
    streams: Vec<Stream>,
    buffers: Vec<Slice>,
    hosts: Vec<HostBuffer>,
}

impl Machine {
    fn new(device: Device, streams: usize) -> Result<Self, Error> {
        let streams: Vec<Stream> = (0..streams).map(|i| device.stream(&format!("s{i}"))).collect();
        let buffers =
            (0..BUFFERS).map(|i| Self::buffer(&device, &streams[0], i as f32)).collect::<Result<_, _>>()?;
        let hosts = (0..HOSTS).map(|_| device.host_buffer(4 * LEN, "host")).collect::<Result<_, _>>()?;
        Ok(Machine { device, streams, buffers, hosts })
    }

    fn buffer(device: &Device, stream: &Stream, value: f32) -> Result<Slice, Error> {
        let out = device.alloc(LEN, DType::F32, Category::Activations, "buffer")?;
        stream.submit(Op::Fill { out: out.clone(), value })?;
        Ok(out)
    }

    fn part(&self, part: Part) -> Result<Slice, Error> {
        self.buffers[part.buffer].part(part.start..part.start + part.len)
    }

    fn run(mut self, program: &[(usize, Step)]) -> Result<Outcome, Error> {
        let mut outcome = Vec::new();
        for (stream, step) in program {
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

/// The steps one after another, on one stream of the real backend.
fn in_order(program: &[(usize, Step)]) -> Outcome {
    Machine::new(Device::cpu().unwrap(), 1).unwrap().run(program).unwrap()
}

fn simulated(program: &[(usize, Step)], options: SimOptions) -> Result<Outcome, Error> {
    Machine::new(Device::sim(options)?, STREAMS)?.run(program)
}

#[test]
fn every_schedule_gives_what_program_order_gives() {
    let programs = SCHEDULES / 40;
    for seed in 0..programs {
        let program = program(seed);
        let expected = in_order(&program);
        for schedule in 0..SCHEDULES / programs {
            let slow_streams = if schedule % 4 == 3 { vec!["s1".into(), "s2".into()] } else { Vec::new() };
            let options = SimOptions { seed: seed << 8 | schedule, slow_streams, ..SimOptions::default() };
            let found = simulated(&program, options);
            assert_eq!(found.as_ref(), Ok(&expected), "program {seed}, schedule {schedule}: {program:#?}");
        }
    }
}

/// The same programs on the real backend, whose streams are threads.
#[test]
fn threads_give_what_program_order_gives() {
    for seed in 0..200 {
        let program = program(seed);
        let found = Machine::new(Device::cpu().unwrap(), STREAMS).unwrap().run(&program).unwrap();
        assert_eq!(found, in_order(&program), "program {seed}");
    }
}

#[test]
fn without_the_waits_the_simulation_fails() {
    let fails = |seed| {
        let options = SimOptions { seed, drop_waits: DropWaits::All, ..SimOptions::default() };
        matches!(simulated(&program(seed), options), Err(Error::Violation(_)))
    };
    let failed = (0..100).filter(|&seed| fails(seed)).count();
    assert!(failed > 0, "none of 100 schedules without waits was noticed");
    // It is not luck: the checker needs no unlucky schedule to see a missing wait.
    assert!(failed >= 95, "{failed} of 100");
}

/// A wait that another wait of the same op implies may be left out unharmed; all others are missed.
#[test]
fn a_single_missing_wait_is_noticed() {
    let (mut dropped, mut noticed) = (0, 0);
    for seed in 0..20 {
        let program = program(seed);
        for wait in 0..30 {
            let options = SimOptions { seed, drop_waits: DropWaits::Nth(wait), ..SimOptions::default() };
            dropped += 1;
            noticed += usize::from(matches!(simulated(&program, options), Err(Error::Violation(_))));
        }
    }
    assert!(noticed * 2 > dropped, "{noticed} of {dropped} single waits");
}

#[test]
fn one_seed_is_one_schedule() {
    for seed in 0..50 {
        let run = |seed| {
            let options = SimOptions { seed, drop_waits: DropWaits::All, ..SimOptions::default() };
            simulated(&program(7), options).map_err(|error| error.to_string())
        };
        assert_eq!(run(seed), run(seed));
    }
}

#[test]
fn unwritten_bytes_are_reported() {
    let device = Device::sim(SimOptions::default()).unwrap();
    let stream = device.stream("s");
    let alloc = |name| device.alloc(8, DType::F32, Category::Activations, name).unwrap();
    let (input, out) = (alloc("input"), alloc("out"));
    stream.submit(Op::Fill { out: input.part(0..7).unwrap(), value: 1.0 }).unwrap();
    stream.submit(Op::Copy { input, out }).unwrap();
    let error = device.synchronize().unwrap_err().to_string();
    assert!(error.contains("copy reads operand `input` at byte 28"), "{error}");
}
