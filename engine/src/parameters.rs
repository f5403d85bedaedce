//! A model's parameters: one buffer of weights, one of gradients, and names.
//!
//! Parameters with weight decay lie first, so that the optimizer, the norm and the clearing of gradients are one or two
//! operations over contiguous memory whatever the number of tensors. Each starts at a multiple of 64 elements; the
//! padding is zero and stays so.

use std::{collections::HashMap, ops::Range};

use ebbtide_kernels::{Category, DType, Op, Slice};
use rand_chacha::{ChaCha8Rng, rand_core::SeedableRng};
use rand_distr::{Distribution, Normal};

use crate::{Engine, Error, Flat, Result, flat::CHUNK};

/// How a parameter starts.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Init {
    /// Every element the same.
    Constant(f32),
    /// Normal deviates of mean 0.
    Normal {
        /// Their standard deviation.
        deviation: f32,
    },
}

/// A parameter's places. Cloning is cheap and shares the memory.
#[derive(Clone, Debug)]
pub struct Parameter {
    /// What computations read: its f32 master, or the 16-bit copy of a matrix where the engine computes in 16 bits.
    pub value: Slice,
    /// Where its gradient accumulates, f32; `None` if the model is not trained.
    pub gradient: Option<Slice>,
    /// Its shape.
    pub shape: Vec<usize>,
}

/// Collects a model's parameters before their memory is laid out.
#[derive(Default)]
pub struct ParametersBuilder {
    specs: Vec<Spec>,
}

#[derive(Clone)]
struct Spec {
    name: String,
    shape: Vec<usize>,
    init: Init,
    range: Range<usize>,
}

impl Spec {
    fn len(&self) -> usize {
        self.shape.iter().product()
    }

    /// Parameters of two or more dimensions decay; biases and gains do not.
    fn decays(&self) -> bool {
        self.shape.len() >= 2
    }
}

/// Each parameter starts at a multiple of it.
const ALIGN_ELEMENTS: usize = 64;

impl ParametersBuilder {
    /// Adds a parameter.
    pub fn add(&mut self, name: impl Into<String>, shape: &[usize], init: Init) {
        self.specs.push(Spec { name: name.into(), shape: shape.to_vec(), init, range: 0..0 });
    }

    /// Lays the parameters out on a device and sets them to their initial values, a function of `seed` and the order of
    /// the names alone.
    ///
    /// # Errors
    /// The device's, above all if the budget cannot hold them.
    pub fn build(mut self, engine: &Engine, seed: u64, trainable: bool) -> Result<Parameters> {
        let mut end = 0;
        let mut decayed = 0;
        for decays in [true, false] {
            for spec in self.specs.iter_mut().filter(|spec| spec.decays() == decays) {
                spec.range = end..end + spec.len();
                end = spec.range.end.next_multiple_of(ALIGN_ELEMENTS);
            }
            if decays {
                decayed = end;
            }
        }
        let device = engine.device();
        let alloc = |len, dtype, name| device.alloc(len, dtype, Category::Weights, name);
        let narrow = match engine.numerics().precision.dtype() {
            DType::F32 => None,
            dtype => Some(alloc(decayed, dtype, "16-bit weights")?),
        };
        let (masters, values) = match narrow {
            // Nothing but the optimizer reads a master.
            Some(narrow) if trainable && engine.offloads_optimizer() => {
                let rest = alloc(end - decayed, DType::F32, "weights")?;
                (Flat::Host(device.host_slab(4 * end, "master weights")?), [narrow, rest])
            }
            narrow => {
                let all = alloc(end, DType::F32, "weights")?;
                let matrices = narrow.map_or_else(|| all.part(0..decayed), Ok)?;
                (Flat::Device(all.clone()), [matrices, all.part(decayed..end)?])
            }
        };
        let gradients = match trainable {
            true => Some(device.alloc(end, DType::F32, Category::Gradients, "gradients")?),
            false => None,
        };
        let by_name = self.specs.iter().enumerate().map(|(i, spec)| (spec.name.clone(), i)).collect();
        let parameters = Parameters { specs: self.specs, by_name, masters, values, gradients, decayed };
        parameters.initialise(engine, seed)?;
        parameters.refresh(engine)?;
        if let Some(gradients) = &parameters.gradients {
            engine.submit(Op::Fill { out: gradients.clone(), value: 0.0 })?;
        }
        Ok(parameters)
    }
}

/// A model's parameters on a device.
pub struct Parameters {
    specs: Vec<Spec>,
    by_name: HashMap<String, usize>,
    masters: Flat,
    /// What computations read of the matrices, which lie first, and of the rest.
    values: [Slice; 2],
    gradients: Option<Slice>,
    decayed: usize,
}

impl Parameters {
    /// Elements, padding included: the length of the flat buffers.
    pub fn flat_len(&self) -> usize {
        self.masters.len()
    }

    /// Elements of all parameters.
    pub fn count(&self) -> usize {
        self.specs.iter().map(Spec::len).sum()
    }

    /// All weights in f32, flat. Who writes them calls [`Parameters::refresh`] then.
    pub fn weights(&self) -> &Flat {
        &self.masters
    }

    /// All gradients, flat; `None` if the model is not trained.
    pub fn gradients(&self) -> Option<&Slice> {
        self.gradients.as_ref()
    }

    /// The leading part of the flat buffers, whose parameters decay.
    pub fn decayed(&self) -> Range<usize> {
        0..self.decayed
    }

    /// The rest, whose parameters do not decay.
    pub fn undecayed(&self) -> Range<usize> {
        self.decayed..self.flat_len()
    }

    /// Names, shapes, and places in the flat buffers, in the order of definition.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &[usize], Range<usize>)> {
        self.specs.iter().map(|spec| (spec.name.as_str(), spec.shape.as_slice(), spec.range.clone()))
    }

    /// A parameter by name.
    ///
    /// # Errors
    /// [`Error::UnknownParameter`].
    pub fn get(&self, name: &str) -> Result<Parameter> {
        let index =
            self.by_name.get(name).ok_or_else(|| Error::UnknownParameter { name: name.to_string() })?;
        let spec = &self.specs[*index];
        let gradient = self.gradients.as_ref().map(|all| all.part(spec.range.clone())).transpose()?;
        let [matrices, rest] = &self.values;
        let (start, end) = (spec.range.start, spec.range.end);
        let value = match spec.decays() {
            true => matrices.part(start..end),
            false => rest.part(start - self.decayed..end - self.decayed),
        }?;
        Ok(Parameter { value, gradient, shape: spec.shape.clone() })
    }

    /// Makes what computations read anew from the f32 weights, where it is not these themselves: once whenever they changed.
    ///
    /// # Errors
    /// The device's.
    pub fn refresh(&self, engine: &Engine) -> Result<()> {
        for half in [self.decayed(), self.undecayed()] {
            let chunk_len = match &self.masters {
                Flat::Device(_) => half.len().max(1),
                Flat::Host(_) => CHUNK,
            };
            for start in half.clone().step_by(chunk_len) {
                let chunk = start..half.end.min(start + chunk_len);
                let masters = match &self.masters {
                    Flat::Device(all) => all.part(chunk.clone())?,
                    Flat::Host(all) => {
                        let out = engine.workspace(chunk.len(), "master weights of a chunk")?;
                        let input = all.part(4 * chunk.start..4 * chunk.end)?;
                        engine.submit(Op::CopyIn { input, out: out.clone() })?;
                        out
                    }
                };
                self.publish(engine, chunk, masters)?;
            }
        }
        Ok(())
    }

    /// Makes what computations read of a range, of matrices or of the rest, from its f32 weights.
    pub(crate) fn publish(&self, engine: &Engine, range: Range<usize>, masters: Slice) -> Result<()> {
        let [matrices, rest] = &self.values;
        let out = match range.end <= self.decayed {
            true => matrices.part(range)?,
            false => rest.part(range.start - self.decayed..range.end - self.decayed)?,
        };
        match (&self.masters, out.dtype()) {
            (Flat::Device(_), DType::F32) => Ok(()),
            _ => engine.submit(Op::Cast { input: masters, out }),
        }
    }

    fn initialise(&self, engine: &Engine, seed: u64) -> Result<()> {
        if engine.device().is_dry() {
            return Ok(());
        }
        let mut values = vec![0.0f32; self.flat_len()];
        let mut random = ChaCha8Rng::seed_from_u64(seed);
        for spec in &self.specs {
            let part = &mut values[spec.range.clone()];
            match spec.init {
                Init::Constant(value) => part.fill(value),
                Init::Normal { deviation } => {
                    let normal = Normal::new(0.0f32, deviation).map_err(|_| Error::Config {
                        field: "init",
                        expected: "a finite standard deviation".to_string(),
                        found: deviation.to_string(),
                    })?;
                    part.iter_mut().for_each(|value| *value = normal.sample(&mut random));
                }
            }
        }
        self.masters.write(engine, 0..values.len(), &values)
    }
}
