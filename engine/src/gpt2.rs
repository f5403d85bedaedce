//! GPT-2 (Radford et al., 2019): learned positions, pre-norm blocks, a head tied to the token table.
//!
//! Parameters go by Hugging Face's names and lie as its Conv1D stores them, `in × out`. Each block is a segment, `h.N`.

use std::str::FromStr;

use ebbtide_kernels::op::GeluKind;
use serde::{Deserialize, Serialize};

use crate::{
    Engine, Error, HeadLoss, Init, LossInto, Parameter, Parameters, ParametersBuilder, Result,
    ops::{Norm, TokenBatch},
    tape::{DropoutSite, Tape, Tensor},
};

/// The sizes of a GPT-2.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Gpt2Config {
    /// Tokens in the vocabulary.
    pub vocabulary: usize,
    /// Longest sequence.
    pub context: usize,
    /// Channels of the residual stream.
    pub width: usize,
    /// Blocks.
    pub layers: usize,
    /// Attention heads of a block; they divide the width.
    pub heads: usize,
    /// Share of elements dropped in training: embeddings, attention probabilities, and both residual branches.
    #[serde(default)]
    pub dropout: f32,
    /// The exact GELU rather than GPT-2's tanh approximation.
    #[serde(default)]
    pub exact_gelu: bool,
    /// Added to variances.
    #[serde(default = "default_epsilon")]
    pub epsilon: f32,
}

fn default_epsilon() -> f32 {
    1e-5
}

impl Gpt2Config {
    /// A published size: `gpt2` (124M), `gpt2-medium` (355M), `gpt2-large` (774M) or `gpt2-xl` (1.5B), without dropout.
    ///
    /// # Errors
    /// [`Error::Config`] for another name.
    pub fn named(name: &str) -> Result<Self> {
        let (layers, width, heads) = match name {
            "gpt2" => (12, 768, 12),
            "gpt2-medium" => (24, 1024, 16),
            "gpt2-large" => (36, 1280, 20),
            "gpt2-xl" => (48, 1600, 25),
            _ => {
                let expected = "gpt2, gpt2-medium, gpt2-large or gpt2-xl".to_string();
                return Err(Error::Config { field: "model", expected, found: name.to_string() });
            }
        };
        Ok(Gpt2Config {
            vocabulary: 50257,
            context: 1024,
            width,
            layers,
            heads,
            dropout: 0.0,
            exact_gelu: false,
            epsilon: default_epsilon(),
        })
    }

    /// Holds the sizes against each other.
    ///
    /// # Errors
    /// [`Error::Config`] names the first field that cannot be.
    pub fn check(&self) -> Result<()> {
        let positive = [
            ("vocabulary", self.vocabulary),
            ("context", self.context),
            ("width", self.width),
            ("layers", self.layers),
            ("heads", self.heads),
        ];
        for (field, value) in positive {
            if value == 0 {
                return Err(Error::Config {
                    field,
                    expected: "at least 1".to_string(),
                    found: "0".to_string(),
                });
            }
        }
        if !self.width.is_multiple_of(self.heads) {
            let expected = format!("a divisor of the width {}", self.width);
            return Err(Error::Config { field: "heads", expected, found: self.heads.to_string() });
        }
        if !(0.0..1.0).contains(&self.dropout) {
            let expected = "a share in [0, 1)".to_string();
            return Err(Error::Config { field: "dropout", expected, found: self.dropout.to_string() });
        }
        if !(self.epsilon > 0.0 && self.epsilon.is_finite()) {
            let expected = "a positive number".to_string();
            return Err(Error::Config { field: "epsilon", expected, found: self.epsilon.to_string() });
        }
        Ok(())
    }

    /// Parameters, the tied head counted once.
    pub fn parameters(&self) -> usize {
        let width = self.width;
        // Four products with their biases, and two norms.
        let block = 12 * width * width + 9 * width + 4 * width;
        (self.vocabulary + self.context + 2) * width + self.layers * block
    }

    /// Floating-point operations of one token's forward and backward, without recompute: 6 a weight of a product and
    /// token, plus causal attention's 6 · layers · context · width.
    pub fn flops_per_token(&self, context: usize) -> u64 {
        let block = 12 * self.width * self.width;
        let weights = self.layers * block + self.vocabulary * self.width;
        (6 * weights + 6 * self.layers * context * self.width) as u64
    }
}

impl FromStr for Gpt2Config {
    type Err = Error;
    fn from_str(name: &str) -> Result<Self> {
        Self::named(name)
    }
}

/// A GPT-2 on a device.
pub struct Gpt2 {
    config: Gpt2Config,
    parameters: Parameters,
    wte: Parameter,
    wpe: Parameter,
    blocks: Vec<Block>,
    final_norm: Norm,
}

struct Block {
    norm1: Norm,
    qkv: Linear,
    attention_out: Linear,
    norm2: Norm,
    up: Linear,
    down: Linear,
    heads: usize,
    gelu: GeluKind,
    /// Of the attention's probabilities, of its branch, of the MLP's branch.
    dropout: [DropoutSite; 3],
}

struct Linear {
    weight: Parameter,
    bias: Parameter,
}

impl Gpt2 {
    /// A model with GPT-2's initial weights: normal with deviation 0.02, residual projections divided by √(2 · layers),
    /// biases 0, gains 1. A function of `seed` alone.
    ///
    /// # Errors
    /// [`Error::Config`] for sizes that cannot be; the device's, above all if the budget cannot hold the parameters.
    pub fn new(engine: &Engine, config: Gpt2Config, seed: u64, trainable: bool) -> Result<Self> {
        config.check()?;
        let parameters = Self::layout(&config).build(engine, seed, trainable)?;
        let norm = |name: String| -> Result<Norm> {
            let weight = parameters.get(&format!("{name}.weight"))?;
            Ok(Norm { weight, bias: parameters.get(&format!("{name}.bias"))?, epsilon: config.epsilon })
        };
        let linear = |name: String| -> Result<Linear> {
            let weight = parameters.get(&format!("{name}.weight"))?;
            Ok(Linear { weight, bias: parameters.get(&format!("{name}.bias"))? })
        };
        let block = |i: usize| -> Result<Block> {
            let name = format!("transformer.h.{i}");
            let site = |site| DropoutSite { probability: config.dropout, site: 1 + 3 * i as u32 + site };
            Ok(Block {
                norm1: norm(format!("{name}.ln_1"))?,
                qkv: linear(format!("{name}.attn.c_attn"))?,
                attention_out: linear(format!("{name}.attn.c_proj"))?,
                norm2: norm(format!("{name}.ln_2"))?,
                up: linear(format!("{name}.mlp.c_fc"))?,
                down: linear(format!("{name}.mlp.c_proj"))?,
                heads: config.heads,
                gelu: if config.exact_gelu { GeluKind::Erf } else { GeluKind::Tanh },
                dropout: [site(0), site(1), site(2)],
            })
        };
        let blocks = (0..config.layers).map(block).collect::<Result<_>>()?;
        let final_norm = norm("transformer.ln_f".to_string())?;
        let (wte, wpe) =
            (parameters.get("transformer.wte.weight")?, parameters.get("transformer.wpe.weight")?);
        Ok(Gpt2 { config, wte, wpe, blocks, final_norm, parameters })
    }

    fn layout(config: &Gpt2Config) -> ParametersBuilder {
        let width = config.width;
        let normal = Init::Normal { deviation: 0.02 };
        let residual = Init::Normal { deviation: 0.02 / (2.0 * config.layers as f32).sqrt() };
        let (zero, one) = (Init::Constant(0.0), Init::Constant(1.0));
        let mut builder = ParametersBuilder::default();
        builder.add("transformer.wte.weight", &[config.vocabulary, width], normal);
        builder.add("transformer.wpe.weight", &[config.context, width], normal);
        for i in 0..config.layers {
            let name = format!("transformer.h.{i}");
            let mut linear = |leaf: &str, inputs: usize, outputs: usize, init: Init| {
                builder.add(format!("{name}.{leaf}.weight"), &[inputs, outputs], init);
                builder.add(format!("{name}.{leaf}.bias"), &[outputs], zero);
            };
            linear("attn.c_attn", width, 3 * width, normal);
            linear("attn.c_proj", width, width, residual);
            linear("mlp.c_fc", width, 4 * width, normal);
            linear("mlp.c_proj", 4 * width, width, residual);
            for norm in ["ln_1", "ln_2"] {
                builder.add(format!("{name}.{norm}.weight"), &[width], one);
                builder.add(format!("{name}.{norm}.bias"), &[width], zero);
            }
        }
        builder.add("transformer.ln_f.weight", &[width], one);
        builder.add("transformer.ln_f.bias", &[width], zero);
        builder
    }

    /// The sizes.
    pub fn config(&self) -> &Gpt2Config {
        &self.config
    }

    /// The parameters.
    pub fn parameters(&self) -> &Parameters {
        &self.parameters
    }

    /// The last norm's output, `batch × context × width`: what the head is given.
    ///
    /// # Errors
    /// [`Error::Shape`] if the context is longer than the model's; the device's.
    pub fn hidden<'m>(&'m self, tape: &mut Tape<'m>, batch: &TokenBatch) -> Result<Tensor> {
        let site = DropoutSite { probability: self.config.dropout, site: 0 };
        let mut x = tape.embedding(batch, &self.wte, &self.wpe, site)?;
        for (i, block) in self.blocks.iter().enumerate() {
            x = tape.segment(format_args!("h.{i}"), x, move |tape, x| block.forward(tape, x))?;
        }
        tape.scope("ln_f", |tape| tape.layer_norm(x, &self.final_norm))
    }

    /// Logits of every position, `batch × context × vocabulary`. For inference.
    ///
    /// # Errors
    /// Those of [`Gpt2::hidden`].
    pub fn logits<'m>(&'m self, tape: &mut Tape<'m>, batch: &TokenBatch) -> Result<Tensor> {
        let hidden = self.hidden(tape, batch)?;
        tape.logits(&hidden, &self.wte)
    }

    /// The loss of a batch, added to `into`.
    ///
    /// # Errors
    /// Those of [`Gpt2::hidden`] and [`Tape::head_loss`].
    pub fn loss<'m>(&'m self, tape: &mut Tape<'m>, batch: &TokenBatch, into: &LossInto) -> Result<HeadLoss> {
        let hidden = self.hidden(tape, batch)?;
        tape.scope("head", |tape| tape.head_loss(&hidden, &self.wte, batch, into))
    }
}

impl Block {
    fn forward<'m>(&'m self, tape: &mut Tape<'m>, x: Tensor) -> Result<Tensor> {
        let [of_attention, of_branch, of_mlp] = self.dropout;
        let (x, delta) = tape.scope("attn", |tape| {
            let normed = tape.layer_norm(x.clone(), &self.norm1)?;
            let qkv = self.qkv.forward(tape, normed)?;
            let mixed = tape.attention(qkv, self.heads, of_attention)?;
            Ok((x, self.attention_out.forward(tape, mixed)?))
        })?;
        tape.scope("mlp", |tape| {
            let (x, normed) = tape.residual_norm(x, delta, &self.norm2, of_branch)?;
            let up = self.up.forward(tape, normed)?;
            let active = tape.gelu(up, self.gelu)?;
            let delta = self.down.forward(tape, active)?;
            tape.residual_add(x, delta, of_mlp)
        })
    }
}

impl Linear {
    fn forward<'m>(&'m self, tape: &mut Tape<'m>, x: Tensor) -> Result<Tensor> {
        tape.linear(x, &self.weight, Some(&self.bias))
    }
}
