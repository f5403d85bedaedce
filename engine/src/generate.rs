//! Writing with a model, one token after another.
//!
//! Every token runs the model over the whole context again: no keys or values are cached, so that `n` tokens after a prompt
//! of `p` cost `n` forward passes of up to `p + n` positions, where a cache would compute one position each. Only the last
//! position meets the head. At the sizes that are trained here a few hundred tokens take seconds; a server of models this
//! is not.

use std::cmp::Ordering;

use ebbtide_kernels::{Category, DType};
use rand_chacha::{ChaCha8Rng, rand_core::SeedableRng};
use rand_distr::{Distribution, StandardUniform};

use crate::{Engine, Error, Result, Tape, TokenBatch, Watch, gpt2::Gpt2};

/// How tokens are drawn.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SampleOptions {
    /// How many.
    pub tokens: usize,
    /// Divides the logits: below 1 the likely become likelier; 0 takes the likeliest every time.
    pub temperature: f32,
    /// Only as many of the likeliest are drawn from; 0 for all.
    pub top_k: usize,
    /// The same seed draws the same tokens.
    pub seed: u64,
}

impl SampleOptions {
    /// Holds the numbers against what can be.
    ///
    /// # Errors
    /// [`Error::Config`] for a temperature that is negative or not finite.
    pub fn check(&self) -> Result<()> {
        if !(self.temperature.is_finite() && self.temperature >= 0.0) {
            let expected = "a finite number of at least 0".to_string();
            return Err(Error::Config {
                field: "temperature",
                expected,
                found: self.temperature.to_string(),
            });
        }
        Ok(())
    }
}

/// Goes on from a prompt, and gives the tokens that were drawn. `on_token` is told each; `false` from it ends the text.
/// Of what is longer than the model's context, the last part counts.
///
/// # Errors
/// [`Error::Shape`] for an empty prompt, or a token outside of the vocabulary; [`Error::NotFinite`] for logits that are not finite,
/// with the first tensor that was not; those of [`SampleOptions::check`]; the device's.
pub fn generate(
    engine: &Engine,
    model: &Gpt2,
    prompt: &[u32],
    options: &SampleOptions,
    on_token: &mut dyn FnMut(u32) -> bool,
) -> Result<Vec<u32>> {
    options.check()?;
    let vocabulary = model.config().vocabulary;
    let shape = |expected: String, found: String| Error::Shape { op: "generate", expected, found };
    if prompt.is_empty() {
        return Err(shape("a prompt of at least one token".to_string(), "none".to_string()));
    }
    if let Some(index) = prompt.iter().position(|&token| token as usize >= vocabulary) {
        let expected = format!("tokens below the vocabulary's {vocabulary}");
        return Err(shape(expected, format!("{} at index {index}", prompt[index])));
    }
    let mut random = ChaCha8Rng::seed_from_u64(options.seed);
    let mut text = prompt.to_vec();
    for _ in 0..options.tokens {
        let start = text.len().saturating_sub(model.config().context);
        let logits = next_logits(engine, model, &text[start..], None)?;
        if !logits.iter().all(|logit| logit.is_finite()) {
            let watch = Watch::default();
            next_logits(engine, model, &text[start..], Some(&watch))?;
            return Err(Error::NotFinite { what: "a logit", first: watch.first() });
        }
        let draw: f64 = StandardUniform.sample(&mut random);
        let token = choose(&logits, options, draw);
        text.push(token);
        if !on_token(token) {
            break;
        }
    }
    Ok(text.split_off(prompt.len()))
}

/// Logits of the token after `tokens`.
fn next_logits(engine: &Engine, model: &Gpt2, tokens: &[u32], watch: Option<&Watch>) -> Result<Vec<f32>> {
    let context = tokens.len();
    let tokens = engine.compute().upload(tokens, Category::Staging, "tokens")?;
    let mut tape = Tape::eval(engine);
    watch.into_iter().for_each(|watch| tape.watch(watch));
    let hidden = model.hidden(&mut tape, &TokenBatch { tokens, targets: None, batch: 1, context })?;
    let width = model.config().width;
    let last = hidden.slice().part((context - 1) * width..context * width)?;
    let last = tape.constant(last, &[1, width])?;
    let logits = tape.logits(&last, &model.parameters().get("transformer.wte.weight")?)?;
    let logits = engine.cast(logits.slice().clone(), DType::F32, Category::Activations, "logits")?;
    Ok(engine.compute().download::<f32>(&logits)?)
}

/// The token that `draw`, in `[0, 1)`, falls on. There are logits, and none is NaN.
fn choose(logits: &[f32], options: &SampleOptions, draw: f64) -> u32 {
    // Likeliest first; of equals, both zeros among them, the lower id: the sort is stable.
    let mut order: Vec<usize> = (0..logits.len()).collect();
    order.sort_by(|&a, &b| logits[b].partial_cmp(&logits[a]).unwrap_or(Ordering::Equal));
    let best = f64::from(logits[order[0]]);
    let candidates = match (options.temperature, options.top_k) {
        (0.0, _) => 1,
        (_, 0) => order.len(),
        (_, top_k) => top_k.min(order.len()),
    };
    let weight = |&token: &usize| ((f64::from(logits[token]) - best) / f64::from(options.temperature)).exp();
    let candidates = &order[..candidates];
    let mut left = draw * candidates.iter().map(weight).sum::<f64>();
    for token in candidates {
        left -= weight(token);
        if left < 0.0 {
            return *token as u32;
        }
    }
    candidates[0] as u32
}

#[cfg(test)]
mod tests {
    use ebbtide_kernels::Device;
    use ebbtide_offload::{OffloadOptions, policy::Builtin};

    use super::*;
    use crate::gpt2::Gpt2Config;

    fn options(temperature: f32, top_k: usize) -> SampleOptions {
        SampleOptions { tokens: 1, temperature, top_k, seed: 0 }
    }

    /// Share of evenly spread draws that fall on each token.
    fn shares(logits: &[f32], options: &SampleOptions) -> Vec<f64> {
        const DRAWS: usize = 10_000;
        let mut shares = vec![0.0; logits.len()];
        for i in 0..DRAWS {
            let token = choose(logits, options, (i as f64 + 0.5) / DRAWS as f64);
            shares[token as usize] += 1.0 / DRAWS as f64;
        }
        shares
    }

    #[test]
    fn draws_follow_the_softmax() {
        let logits = [1.0, 3.0, 2.0, f32::NEG_INFINITY];
        for temperature in [0.5, 1.0, 2.0] {
            let weights: Vec<f64> = logits.iter().map(|&l| f64::from(l / temperature).exp()).collect();
            let total: f64 = weights.iter().sum();
            for (share, weight) in shares(&logits, &options(temperature, 0)).iter().zip(weights) {
                // Evenly spread draws miss each border by at most one, and there are two.
                assert!((share - weight / total).abs() <= 2e-4);
            }
        }
    }

    #[test]
    fn top_k_leaves_out_the_rest_and_zero_temperature_all_but_one() {
        let logits = [1.0, 3.0, 3.0, 0.0];
        let of_two = shares(&logits, &options(1.0, 2));
        assert!(
            (of_two[1] - 0.5).abs() < 1e-3 && (of_two[2] - 0.5).abs() < 1e-3 && of_two[0] + of_two[3] == 0.0
        );
        assert_eq!(choose(&logits, &options(0.0, 0), 0.99), 1);
        assert_eq!(choose(&[-0.0, 0.0], &options(0.0, 0), 0.99), 0);
        // Never outside of the vocabulary, however low the temperature or high the rank.
        assert_eq!(choose(&logits, &options(f32::MIN_POSITIVE, 99), 0.0), 1);
    }

    fn model() -> (Engine, Gpt2) {
        let device = Device::cpu().unwrap();
        let engine = Engine::new(&device, Builtin::Keep.policy(), OffloadOptions::default()).unwrap();
        let config = Gpt2Config { context: 8, width: 16, layers: 2, heads: 2, vocabulary: 13, ..named() };
        let model = Gpt2::new(&engine, config, 1, false).unwrap();
        (engine, model)
    }

    fn named() -> Gpt2Config {
        Gpt2Config::named("gpt2").unwrap()
    }

    #[test]
    fn a_seed_draws_the_same_and_only_the_context_counts() {
        let (engine, model) = model();
        let draw = |prompt: &[u32], seed: u64, stop_after: usize| {
            let options = SampleOptions { tokens: 20, temperature: 1.0, top_k: 0, seed };
            let mut told = Vec::new();
            let mut on_token = |token| {
                told.push(token);
                told.len() < stop_after
            };
            let drawn = generate(&engine, &model, prompt, &options, &mut on_token).unwrap();
            assert_eq!(drawn, told);
            drawn
        };
        let prompt: Vec<u32> = (0..8).collect();
        let first = draw(&prompt, 1, usize::MAX);
        assert_eq!((first.len(), draw(&prompt, 1, usize::MAX)), (20, first.clone()));
        assert_ne!(draw(&prompt, 2, usize::MAX), first);
        assert_eq!(draw(&prompt, 1, 3), first[..3]);
        assert_eq!(draw(&[&[12, 11, 10], &prompt[..]].concat(), 1, usize::MAX), first);
    }

    #[test]
    fn the_last_position_decides() {
        let (engine, model) = model();
        let logits = |tokens: &[u32]| next_logits(&engine, &model, tokens, None).unwrap();
        assert_eq!(logits(&[1, 2, 3]).len(), 13);
        assert_ne!(logits(&[1, 2, 3]), logits(&[1, 2, 4]));
    }

    #[test]
    fn what_cannot_be_gone_on_from_is_an_error() {
        let (engine, model) = model();
        let error = |prompt: &[u32], temperature: f32| {
            generate(&engine, &model, prompt, &options(temperature, 0), &mut |_| true)
                .unwrap_err()
                .to_string()
        };
        assert!(error(&[], 1.0).contains("at least one token"));
        assert!(error(&[0, 13], 1.0).contains("below the vocabulary's 13, found 13 at index 1"));
        for temperature in [-1.0, f32::NAN, f32::INFINITY] {
            assert!(error(&[0], temperature).starts_with("temperature: "));
        }
    }
}
