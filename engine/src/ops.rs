//! Differentiable operations: each computes, saves what its backward needs, and records the backward.
//!
//! Saved for backward, in elements: linear its input; GELU its input (its output is the next linear's input); attention
//! `qkv`, its output and a logsumexp a row; a norm what it normalised and two statistics a row. A norm's output is
//! offered to the policy to be made again rather than saved.

use std::rc::Rc;

use ebbtide_kernels::{
    Category, DType, Op, Slice,
    op::{
        Attention, AttentionBackward, AttentionShape, CrossEntropy, Dropout, Embedding, EmbeddingBackward,
        GeluKind, Gemm, LayerNorm, LayerNormApply, LayerNormBackward, Layout, Residual, reduce_workspace,
    },
};
use ebbtide_offload::{Role, Saved};

use crate::{
    Engine, Error, Parameter, Result,
    tape::{Backward, DropoutSite, Recipe, Tape, Tensor},
};

/// Logits that exist at once in a chunked head, in bytes, unless a single row needs more.
const HEAD_CHUNK_BYTES: usize = 64 << 20;

/// Where a batch's tokens and targets lie on the device.
#[derive(Clone, Debug)]
pub struct TokenBatch {
    /// Token ids, u32, `batch × context`.
    pub tokens: Slice,
    /// Targets, i32, `batch × context`; negative ones are ignored. `None` where only logits are wanted.
    pub targets: Option<Slice>,
    /// Sequences.
    pub batch: usize,
    /// Positions of each.
    pub context: usize,
}

/// Gain, shift and epsilon of a layer norm.
#[derive(Clone, Debug)]
pub struct Norm {
    /// Gain, `width`.
    pub weight: Parameter,
    /// Shift, `width`.
    pub bias: Parameter,
    /// Added to the variance.
    pub epsilon: f32,
}

/// A loss: the end of a tape, and all that [`Tape::backward`] starts from.
#[derive(Debug)]
pub struct HeadLoss {
    /// The tensor that the head was given, and its gradient.
    pub(crate) gradient: Option<(u64, Slice)>,
}

/// Where a loss goes.
#[derive(Clone, Debug)]
pub struct LossInto {
    /// One f32 on the device, which `weight` × the sum of the tokens' losses is added to.
    pub sum: Slice,
    /// What each target weighs: 1 / targets of the whole accumulation window, for a mean over all of them.
    pub weight: f32,
    /// One f32 on the device that multiplies the gradient, and not the loss: see [`crate::scaler`].
    pub loss_scale: Option<Slice>,
}

impl<'m> Tape<'m> {
    /// Token plus position embedding: `batch × context × width`.
    ///
    /// # Errors
    /// [`Error::Shape`] if the context exceeds the position table; the device's. An id outside of the token table fails
    /// when the op runs.
    pub fn embedding(
        &mut self,
        batch: &TokenBatch,
        wte: &Parameter,
        wpe: &Parameter,
        site: DropoutSite,
    ) -> Result<Tensor> {
        let [vocabulary, width] = two_dimensions("embedding", wte)?;
        let [positions, _] = two_dimensions("embedding", wpe)?;
        let (sequences, context) = (batch.batch, batch.context);
        if context > positions {
            return Err(Error::Shape {
                op: "embedding",
                expected: format!("a context of at most {positions}"),
                found: context.to_string(),
            });
        }
        let dropout = self.dropout(site);
        let dtype = self.result("embedding", &[]);
        let out = self.engine().activation(sequences * context * width, dtype, &self.name("embedding"))?;
        self.engine().submit(Op::Embedding(Embedding {
            tokens: batch.tokens.clone(),
            wte: wte.value.clone(),
            wpe: wpe.value.part(0..context * width)?,
            out: out.clone(),
            batch: sequences,
            context,
            width,
            vocabulary,
            dropout,
        }))?;
        let out = self.tensor(out, vec![sequences, context, width]);
        if let (true, Some(dwte), Some(dwpe)) = (self.is_recording(), &wte.gradient, &wpe.gradient) {
            let (id, tokens, dwte) = (out.id, batch.tokens.clone(), dwte.clone());
            let dwpe = dwpe.part(0..context * width)?;
            self.push(move |backward| {
                let Some(dout) = backward.take(id) else { return Ok(()) };
                backward.engine.submit(Op::EmbeddingBackward(EmbeddingBackward {
                    tokens,
                    dout,
                    dwte,
                    dwpe,
                    batch: sequences,
                    context,
                    width,
                    vocabulary,
                    dropout,
                }))
            });
        }
        Ok(out)
    }

    /// Layer norm of `x` over its last axis.
    ///
    /// # Errors
    /// The device's, among them that of a gain of another width.
    pub fn layer_norm(&mut self, x: Tensor, norm: &Norm) -> Result<Tensor> {
        let (rows, width) = x.rows_and_width();
        let stats = self.run_norm(&x.slice, None, norm, rows, width)?;
        let normed = self.tensor(stats.out.clone(), x.shape.clone());
        if self.is_recording() {
            self.record_norm(x.clone(), x.id, None, &normed, stats, norm)?;
        }
        Ok(normed)
    }

    /// `sum = x + dropout(delta)` and its layer norm, in one pass: `(sum, normed)`.
    ///
    /// # Errors
    /// [`Error::Shape`] if the two differ; the device's.
    pub fn residual_norm(
        &mut self,
        x: Tensor,
        delta: Tensor,
        norm: &Norm,
        site: DropoutSite,
    ) -> Result<(Tensor, Tensor)> {
        same_shape("residual_norm", &x, &delta)?;
        let (rows, width) = x.rows_and_width();
        let dtypes = [x.slice.dtype(), delta.slice.dtype()];
        let sum_dtype = self.result("residual", &dtypes);
        let x = self.cast(x, sum_dtype)?;
        let sum = self.engine().activation(x.slice.len(), sum_dtype, &self.name("residual"))?;
        let dropout = self.dropout(site);
        let residual = Residual { input: x.slice.clone(), out: sum.clone(), dropout };
        let stats = self.run_norm(&delta.slice, Some(residual), norm, rows, width)?;
        let sum = self.tensor(sum, x.shape.clone());
        let normed = self.tensor(stats.out.clone(), x.shape.clone());
        if self.is_recording() {
            let delta = Delta { id: delta.id, dropout, dtype: dtypes[1] };
            self.record_norm(sum.clone(), x.id, Some(delta), &normed, stats, norm)?;
        }
        Ok((sum, normed))
    }

    /// `x + dropout(delta)`, in the memory of `delta`, which is consumed.
    ///
    /// # Errors
    /// [`Error::Shape`] if the two differ; the device's.
    pub fn residual_add(&mut self, x: Tensor, delta: Tensor, site: DropoutSite) -> Result<Tensor> {
        same_shape("residual_add", &x, &delta)?;
        let Tensor { id: delta_id, slice, shape } = delta;
        let (delta_dtype, sum_dtype) =
            (slice.dtype(), self.result("residual", &[x.slice.dtype(), slice.dtype()]));
        let x = self.cast(x, sum_dtype)?;
        let slice = match slice.dtype() == sum_dtype {
            true => self.engine().owned(slice)?,
            false => self.engine().cast(slice, sum_dtype, Category::Activations, &self.name("residual"))?,
        };
        let dropout = self.dropout(site);
        if let Some(dropout) = dropout {
            self.engine().submit(Op::Dropout { data: slice.clone(), dropout })?;
        }
        self.engine().submit(Op::Add { input: x.slice.clone(), out: slice.clone() })?;
        let sum = self.tensor(slice, shape);
        if self.is_recording() {
            let (id, x_id) = (sum.id, x.id);
            let delta = Delta { id: delta_id, dropout, dtype: delta_dtype };
            self.push(move |backward| match backward.take(id) {
                Some(dout) => give_sum(backward, x_id, delta, dout),
                None => Ok(()),
            });
        }
        Ok(sum)
    }

    /// `x · weight + bias`, with `weight: in × out` (as GPT-2's Conv1D stores it).
    ///
    /// # Errors
    /// [`Error::Shape`] if the widths differ; the device's.
    pub fn linear(&mut self, x: Tensor, weight: &Parameter, bias: Option<&Parameter>) -> Result<Tensor> {
        let [k, n] = two_dimensions("linear", weight)?;
        let (m, width) = x.rows_and_width();
        if width != k {
            let expected = format!("an input of width {k}");
            return Err(Error::Shape { op: "linear", expected, found: format!("{:?}", x.shape) });
        }
        let dtype = self.result("linear", &[x.slice.dtype()]);
        let x = self.cast(x, dtype)?;
        let out = self.engine().activation(m * n, dtype, &self.name("linear"))?;
        self.engine().submit(Op::Gemm(Gemm {
            a: x.slice.clone(),
            a_layout: Layout::Normal,
            b: weight.value.clone(),
            b_layout: Layout::Normal,
            bias: bias.map(|bias| bias.value.clone()),
            out: out.clone(),
            accumulate: false,
            m,
            n,
            k,
        }))?;
        let mut shape = x.shape.clone();
        if let Some(last) = shape.last_mut() {
            *last = n;
        }
        let out = self.tensor(out, shape);
        if self.is_recording() {
            let input = self.save_input(&x, "linear.input", Role::Activation)?;
            let (id, x_id, weight) = (out.id, x.id, weight.clone());
            let dbias = bias.and_then(|bias| bias.gradient.clone());
            self.push(move |backward| {
                let Some(dout) = backward.take(id) else { return Ok(()) };
                let engine = backward.engine.clone();
                if let Some(dbias) = dbias {
                    let workspace = engine.workspace(reduce_workspace(m, n), "dbias")?;
                    engine.submit(Op::BiasBackward {
                        dout: dout.clone(),
                        dbias,
                        workspace,
                        rows: m,
                        width: n,
                    })?;
                }
                if let Some(dweight) = weight.gradient {
                    engine.submit(Op::Gemm(Gemm {
                        a: input.load(&engine)?,
                        a_layout: Layout::Transposed,
                        b: dout.clone(),
                        b_layout: Layout::Normal,
                        bias: None,
                        out: dweight,
                        accumulate: true,
                        m: k,
                        n,
                        k: m,
                    }))?;
                }
                drop(input);
                let dx = engine.gradient(m * k, dtype, "dlinear")?;
                engine.submit(Op::Gemm(Gemm {
                    a: dout,
                    a_layout: Layout::Normal,
                    b: weight.value,
                    b_layout: Layout::Transposed,
                    bias: None,
                    out: dx.clone(),
                    accumulate: false,
                    m,
                    n: k,
                    k: n,
                }))?;
                backward.give(x_id, dx)
            });
        }
        Ok(out)
    }

    /// GELU, elementwise.
    ///
    /// # Errors
    /// The device's.
    pub fn gelu(&mut self, x: Tensor, kind: GeluKind) -> Result<Tensor> {
        let dtype = x.slice.dtype();
        let out = self.engine().activation(x.slice.len(), dtype, &self.name("gelu"))?;
        self.engine().submit(Op::Gelu { input: x.slice.clone(), out: out.clone(), kind })?;
        let out = self.tensor(out, x.shape.clone());
        if self.is_recording() {
            let input = self.save(&x, "gelu.input", Role::GeluInput)?;
            let (recipe_input, len, name) = (input.clone(), x.slice.len(), self.name("gelu"));
            self.offer_recipe(&out, "gelu.output", Role::GeluOutput, || {
                Rc::new(move |engine: &Engine| {
                    let out = engine.activation(len, dtype, &name)?;
                    let input = engine.offload().load(&recipe_input)?;
                    engine.submit(Op::Gelu { input, out: out.clone(), kind })?;
                    Ok(out)
                })
            });
            let (id, x_id) = (out.id, x.id);
            self.push(move |backward| {
                let Some(dout) = backward.take(id) else { return Ok(()) };
                let engine = backward.engine.clone();
                let gradient = engine.owned(dout)?;
                let input = engine.offload().load(&input)?;
                engine.submit(Op::GeluBackward { input, gradient: gradient.clone(), kind })?;
                backward.give(x_id, gradient)
            });
        }
        Ok(out)
    }

    /// Causal self-attention of packed projections `batch × context × 3·width`: `batch × context × width`.
    ///
    /// # Errors
    /// [`Error::Shape`] if `qkv` has another number of axes or the heads do not divide the width; the device's.
    pub fn attention(&mut self, qkv: Tensor, heads: usize, site: DropoutSite) -> Result<Tensor> {
        let (batch, context, width) = match qkv.shape[..] {
            [batch, context, packed] if heads > 0 && packed % (3 * heads) == 0 => {
                (batch, context, packed / 3)
            }
            _ => {
                let expected = format!("batch × context × 3·width, with {heads} heads that divide the width");
                return Err(Error::Shape { op: "attention", expected, found: format!("{:?}", qkv.shape) });
            }
        };
        let head_size = width / heads;
        let shape =
            AttentionShape { batch, context, heads, head_size, scale: 1.0 / (head_size as f32).sqrt() };
        let dropout = self.dropout(site);
        let dtype = self.result("attention", &[qkv.slice.dtype()]);
        let qkv = self.cast(qkv, dtype)?;
        let out = self.engine().activation(batch * context * width, dtype, &self.name("attention"))?;
        let lse = self.engine().activation(shape.rows(), DType::F32, &self.name("attention.lse"))?;
        self.engine().submit(Op::Attention(Attention {
            qkv: qkv.slice.clone(),
            out: out.clone(),
            lse: lse.clone(),
            shape,
            dropout,
        }))?;
        let out = self.tensor(out, vec![batch, context, width]);
        if self.is_recording() {
            let lse = self.tensor(lse, vec![batch, heads, context]);
            let saved_qkv = self.save(&qkv, "attention.qkv", Role::Attention)?;
            let saved_out = self.save(&out, "attention.out", Role::Attention)?;
            let saved_lse = self.save(&lse, "attention.lse", Role::Statistic)?;
            let (id, qkv_id) = (out.id, qkv.id);
            self.push(move |backward| {
                let Some(dout) = backward.take(id) else { return Ok(()) };
                let engine = backward.engine.clone();
                let dqkv = engine.gradient(3 * shape.channels(), dtype, "dqkv")?;
                engine.submit(Op::AttentionBackward(AttentionBackward {
                    dout,
                    out: engine.offload().load(&saved_out)?,
                    lse: engine.offload().load(&saved_lse)?,
                    qkv: engine.offload().load(&saved_qkv)?,
                    dqkv: dqkv.clone(),
                    workspace: engine.workspace(shape.rows(), "attention.delta")?,
                    shape,
                    dropout,
                }))?;
                backward.give(qkv_id, dqkv)
            });
        }
        Ok(out)
    }

    /// Logits of a tied head, `x · tableᵀ`, with `table: vocabulary × width`. Not differentiable: training goes through
    /// [`Tape::head_loss`], which never holds all logits at once.
    ///
    /// # Errors
    /// [`Error::Shape`] if the widths differ; the device's.
    pub fn logits(&mut self, x: &Tensor, table: &Parameter) -> Result<Tensor> {
        let [vocabulary, width] = two_dimensions("logits", table)?;
        let (rows, _) = head_rows(x, width)?;
        let dtype = self.result("logits", &[x.slice.dtype()]);
        let out = self.engine().activation(rows * vocabulary, dtype, &self.name("logits"))?;
        let narrow =
            self.engine().cast(x.slice.clone(), dtype, Category::Activations, &self.name("head.input"))?;
        self.engine().submit(head_product(narrow, table, out.clone(), rows, vocabulary, width))?;
        let mut shape = x.shape.clone();
        if let Some(last) = shape.last_mut() {
            *last = vocabulary;
        }
        Ok(self.tensor(out, shape))
    }

    /// Softmax cross-entropy of a tied head, in chunks of rows: the logits of all tokens never exist at once.
    ///
    /// On a recording tape the gradients of the head are computed in the same pass, while a chunk's logits exist: the
    /// table's gradient accumulates at once, and `x`'s is handed to [`Tape::backward`]. So the loss is where a tape
    /// ends, and its gradient is 1 by definition; scale it through [`LossInto::weight`].
    ///
    /// # Errors
    /// [`Error::Shape`] if there are no targets or sizes differ; the device's. A target at or above the vocabulary fails
    /// when the op runs.
    pub fn head_loss(
        &mut self,
        x: &Tensor,
        table: &Parameter,
        batch: &TokenBatch,
        into: &LossInto,
    ) -> Result<HeadLoss> {
        let [vocabulary, width] = two_dimensions("head_loss", table)?;
        let dtype = self.result("logits", &[x.slice.dtype()]);
        let (rows, _) = head_rows(x, width)?;
        let chunk = chunk_rows(rows, vocabulary, dtype);
        let Some(targets) = &batch.targets else {
            let found = "none".to_string();
            return Err(Error::Shape { op: "head_loss", expected: format!("{rows} targets"), found });
        };
        let engine = self.engine().clone();
        let recording = self.is_recording();
        let losses = engine.workspace(rows, "losses")?;
        let dx = recording.then(|| engine.gradient(rows * width, dtype, "dhead")).transpose()?;
        let logits = engine.gradient(chunk * vocabulary, dtype, "logits")?;
        let input = engine.cast(x.slice.clone(), dtype, Category::Activations, "head.input")?;
        for start in (0..rows).step_by(chunk) {
            let count = chunk.min(rows - start);
            let logits = logits.part(0..count * vocabulary)?;
            let x = input.part(start * width..(start + count) * width)?;
            engine.submit(head_product(x.clone(), table, logits.clone(), count, vocabulary, width))?;
            engine.submit(Op::CrossEntropy(CrossEntropy {
                logits: logits.clone(),
                targets: targets.part(start..start + count)?,
                losses: losses.part(start..start + count)?,
                rows: count,
                vocabulary,
                gradient_scale: recording.then_some(into.weight),
                loss_scale: into.loss_scale.clone().filter(|_| recording),
            }))?;
            let Some(dx) = &dx else { continue };
            engine.submit(Op::Gemm(Gemm {
                a: logits.clone(),
                a_layout: Layout::Normal,
                b: table.value.clone(),
                b_layout: Layout::Normal,
                bias: None,
                out: dx.part(start * width..(start + count) * width)?,
                accumulate: false,
                m: count,
                n: width,
                k: vocabulary,
            }))?;
            if let Some(dtable) = &table.gradient {
                engine.submit(Op::Gemm(Gemm {
                    a: logits,
                    a_layout: Layout::Transposed,
                    b: x,
                    b_layout: Layout::Normal,
                    bias: None,
                    out: dtable.clone(),
                    accumulate: true,
                    m: vocabulary,
                    n: width,
                    k: count,
                }))?;
            }
        }
        engine.submit(Op::Sum { input: losses, out: into.sum.clone(), scale: into.weight })?;
        let give_back = |dx| engine.cast(dx, x.slice.dtype(), Category::Workspace, "dhead");
        Ok(HeadLoss { gradient: dx.map(give_back).transpose()?.map(|dx| (x.id, dx)) })
    }

    /// The type of an operation's result here.
    fn result(&self, operation: &str, inputs: &[DType]) -> DType {
        self.engine().numerics().result(operation, inputs)
    }

    /// A tensor in another type, itself if it is of that type; differentiable.
    pub(crate) fn cast(&mut self, x: Tensor, dtype: DType) -> Result<Tensor> {
        let from = x.slice.dtype();
        if from == dtype {
            return Ok(x);
        }
        let slice = self.engine().cast(x.slice, dtype, Category::Activations, &self.name("cast"))?;
        let out = self.tensor(slice, x.shape);
        if self.is_recording() {
            let (id, x_id) = (out.id, x.id);
            self.push(move |backward| {
                let Some(dout) = backward.take(id) else { return Ok(()) };
                let dx = backward.engine.cast(dout, from, Category::Workspace, "dcast")?;
                backward.give(x_id, dx)
            });
        }
        Ok(out)
    }

    fn run_norm(
        &mut self,
        input: &Slice,
        residual: Option<Residual>,
        norm: &Norm,
        rows: usize,
        width: usize,
    ) -> Result<NormResult> {
        let engine = self.engine();
        let dtype = self.result("norm", &[input.dtype()]);
        let out = engine.activation(rows * width, dtype, &self.name("norm"))?;
        let mean = engine.activation(rows, DType::F32, &self.name("norm.mean"))?;
        let rstd = engine.activation(rows, DType::F32, &self.name("norm.rstd"))?;
        engine.submit(Op::LayerNorm(LayerNorm {
            input: input.clone(),
            residual,
            weight: norm.weight.value.clone(),
            bias: norm.bias.value.clone(),
            out: out.clone(),
            mean: mean.clone(),
            rstd: rstd.clone(),
            rows,
            width,
            epsilon: norm.epsilon,
        }))?;
        Ok(NormResult { out, mean, rstd })
    }

    /// Records a norm of `x`. With a delta, `x` is the sum of the stream `stream_id` and the delta, and both get its
    /// gradient; without, `stream_id` is `x` itself.
    fn record_norm(
        &mut self,
        x: Tensor,
        stream_id: u64,
        delta: Option<Delta>,
        normed: &Tensor,
        stats: NormResult,
        norm: &Norm,
    ) -> Result<()> {
        let (rows, width) = x.rows_and_width();
        let mean = self.tensor(stats.mean, vec![rows]);
        let rstd = self.tensor(stats.rstd, vec![rows]);
        let saved = SavedNorm {
            x: self.save(&x, "norm.input", Role::NormInput)?,
            mean: self.save(&mean, "norm.mean", Role::Statistic)?,
            rstd: self.save(&rstd, "norm.rstd", Role::Statistic)?,
            rows,
            width,
            dtype: normed.slice.dtype(),
        };
        let (recipe, name, recipe_norm) = (saved.clone(), self.name("norm"), norm.clone());
        self.offer_recipe(normed, "norm.output", Role::NormOutput, || recipe.recipe(recipe_norm, name));
        let (normed_id, x_id, x_dtype, norm) = (normed.id, x.id, x.slice.dtype(), norm.clone());
        drop(x);
        self.push(move |backward| {
            let Some(dout) = backward.take(normed_id) else {
                // Only the sum was used.
                return match (delta, backward.take(x_id)) {
                    (Some(delta), Some(dx)) => give_sum(backward, stream_id, delta, dx),
                    (_, Some(dx)) => backward.give(stream_id, dx),
                    (_, None) => Ok(()),
                };
            };
            let engine = backward.engine.clone();
            let from_above = backward.take(x_id);
            let accumulate = from_above.is_some();
            let dinput = match from_above {
                Some(dx) => engine.owned(dx)?,
                None => engine.gradient(rows * width, x_dtype, "dresidual")?,
            };
            let ddelta = match delta {
                Some(Delta { dropout: Some(dropout), dtype, .. }) => {
                    Some((engine.gradient(rows * width, dtype, "ddelta")?, dropout))
                }
                _ => None,
            };
            let parameter_gradient = |parameter: &Parameter| match &parameter.gradient {
                Some(gradient) => Ok(gradient.clone()),
                None => engine.workspace(width, "unused gradient"),
            };
            let (dweight, dbias) = (parameter_gradient(&norm.weight)?, parameter_gradient(&norm.bias)?);
            for (parameter, gradient) in [(&norm.weight, &dweight), (&norm.bias, &dbias)] {
                if parameter.gradient.is_none() {
                    engine.submit(Op::Fill { out: gradient.clone(), value: 0.0 })?;
                }
            }
            engine.submit(Op::LayerNormBackward(LayerNormBackward {
                dout,
                input: engine.offload().load(&saved.x)?,
                weight: norm.weight.value.clone(),
                mean: engine.offload().load(&saved.mean)?,
                rstd: engine.offload().load(&saved.rstd)?,
                dinput: dinput.clone(),
                accumulate,
                ddelta: ddelta.clone(),
                dweight,
                dbias,
                workspace: engine.workspace(reduce_workspace(rows, 2 * width), "dnorm")?,
                rows,
                width,
            }))?;
            if let Some(delta) = delta {
                let gradient = match ddelta {
                    Some((slice, _)) => slice,
                    None => engine.cast(dinput.clone(), delta.dtype, Category::Workspace, "ddelta")?,
                };
                backward.give(delta.id, gradient)?;
            }
            backward.give(stream_id, dinput)
        });
        Ok(())
    }
}

struct NormResult {
    out: Slice,
    mean: Slice,
    rstd: Slice,
}

#[derive(Clone)]
struct SavedNorm {
    x: Saved,
    mean: Saved,
    rstd: Saved,
    rows: usize,
    width: usize,
    /// Of the norm's result.
    dtype: DType,
}

/// What a sum adds to the residual stream.
#[derive(Clone, Copy)]
struct Delta {
    id: u64,
    dropout: Option<Dropout>,
    /// Of the delta, and so of its gradient, whatever the sum's is.
    dtype: DType,
}

impl SavedNorm {
    fn recipe<'m>(self, norm: Norm, name: String) -> Recipe<'m> {
        Rc::new(move |engine: &Engine| {
            let out = engine.activation(self.rows * self.width, self.dtype, &name)?;
            engine.submit(Op::LayerNormApply(LayerNormApply {
                input: engine.offload().load(&self.x)?,
                weight: norm.weight.value.clone(),
                bias: norm.bias.value.clone(),
                mean: engine.offload().load(&self.mean)?,
                rstd: engine.offload().load(&self.rstd)?,
                out: out.clone(),
                rows: self.rows,
                width: self.width,
            }))?;
            Ok(out)
        })
    }
}

/// Hands the gradient of `stream + dropout(delta)` to both.
fn give_sum(backward: &mut Backward, stream_id: u64, delta: Delta, dx: Slice) -> Result<()> {
    let engine = backward.engine.clone();
    let ddelta = match delta.dropout {
        None => dx.clone(),
        Some(dropout) => {
            let ddelta = engine.owned(dx.clone())?;
            engine.submit(Op::Dropout { data: ddelta.clone(), dropout })?;
            ddelta
        }
    };
    let ddelta = engine.cast(ddelta, delta.dtype, Category::Workspace, "ddelta")?;
    backward.give(delta.id, ddelta)?;
    backward.give(stream_id, dx)
}

fn head_product(x: Slice, table: &Parameter, out: Slice, rows: usize, vocabulary: usize, width: usize) -> Op {
    Op::Gemm(Gemm {
        a: x,
        a_layout: Layout::Normal,
        b: table.value.clone(),
        b_layout: Layout::Transposed,
        bias: None,
        out,
        accumulate: false,
        m: rows,
        n: vocabulary,
        k: width,
    })
}

/// Rows of a chunk of the head: as even as can be, in multiples of 16, at most [`HEAD_CHUNK_BYTES`] of logits.
fn chunk_rows(rows: usize, vocabulary: usize, dtype: DType) -> usize {
    let bytes = rows * vocabulary * dtype.size_bytes();
    let chunks = bytes.div_ceil(HEAD_CHUNK_BYTES).max(1);
    rows.div_ceil(chunks).next_multiple_of(16).min(rows.max(1))
}

fn head_rows(x: &Tensor, width: usize) -> Result<(usize, usize)> {
    match x.rows_and_width() {
        (rows, found) if found == width => Ok((rows, width)),
        _ => {
            let expected = format!("an input of width {width}");
            Err(Error::Shape { op: "head", expected, found: format!("{:?}", x.shape) })
        }
    }
}

fn two_dimensions(op: &'static str, parameter: &Parameter) -> Result<[usize; 2]> {
    match parameter.shape[..] {
        [a, b] => Ok([a, b]),
        _ => {
            let expected = "a parameter of two dimensions".to_string();
            Err(Error::Shape { op, expected, found: format!("{:?}", parameter.shape) })
        }
    }
}

fn same_shape(op: &'static str, x: &Tensor, delta: &Tensor) -> Result<()> {
    if x.shape == delta.shape {
        return Ok(());
    }
    Err(Error::Shape { op, expected: format!("{:?}", x.shape), found: format!("{:?}", delta.shape) })
}

/// One f32 on the device.
pub(crate) fn scalar(engine: &Engine, name: &str) -> Result<Slice> {
    Ok(engine.device().alloc(1, DType::F32, Category::Workspace, name)?)
}
