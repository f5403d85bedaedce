//! Text to tokens and back: bytes, or GPT-2's byte pairs.

use std::{fmt, str::FromStr};

use serde::{Deserialize, Serialize};
use tiktoken_rs::CoreBPE;

/// What tokens are.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum TokenizerKind {
    /// The bytes of UTF-8: 256 tokens.
    Bytes,
    /// GPT-2's byte-pair encoding: 50257 tokens.
    Gpt2,
}

impl TokenizerKind {
    /// All of them.
    pub const ALL: [TokenizerKind; 2] = [TokenizerKind::Bytes, TokenizerKind::Gpt2];

    /// Tokens there are.
    pub const fn vocabulary(self) -> usize {
        match self {
            TokenizerKind::Bytes => 256,
            TokenizerKind::Gpt2 => 50257,
        }
    }
}

impl fmt::Display for TokenizerKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            TokenizerKind::Bytes => "bytes",
            TokenizerKind::Gpt2 => "gpt2",
        })
    }
}

impl FromStr for TokenizerKind {
    type Err = String;
    fn from_str(text: &str) -> Result<Self, String> {
        let found = TokenizerKind::ALL.into_iter().find(|kind| kind.to_string() == text);
        found.ok_or_else(|| format!("unknown tokenizer `{text}`: expected bytes or gpt2"))
    }
}

/// What can go wrong with a tokenizer.
#[derive(Debug, thiserror::Error)]
pub enum TokenizerError {
    /// A token that stands for nothing.
    #[error("token {token} at index {index} is outside of the tokenizer's {vocabulary}")]
    OutOfVocabulary {
        /// The token.
        token: u16,
        /// Its place.
        index: usize,
        /// One past the last.
        vocabulary: usize,
    },
    /// The built-in vocabulary cannot be read.
    #[error("cannot read the tokenizer's vocabulary: {0}")]
    Vocabulary(String),
}

/// Bytes of white space that may stand in a row in what GPT-2's regular expression is given. It keeps a way back for every
/// character of a run, and panics when there are more than a million.
const LONGEST_RUN_BYTES: usize = 1 << 16;

/// A tokenizer. GPT-2's takes a tenth of a second to make.
pub struct Tokenizer {
    kind: TokenizerKind,
    pairs: Option<CoreBPE>,
}

impl Tokenizer {
    /// A tokenizer of a kind; its vocabulary is built in.
    ///
    /// # Errors
    /// [`TokenizerError::Vocabulary`] if it cannot be read.
    pub fn new(kind: TokenizerKind) -> Result<Self, TokenizerError> {
        let pairs = match kind {
            TokenizerKind::Bytes => None,
            TokenizerKind::Gpt2 => {
                let pairs = tiktoken_rs::r50k_base();
                Some(pairs.map_err(|error| TokenizerError::Vocabulary(error.to_string()))?)
            }
        };
        Ok(Tokenizer { kind, pairs })
    }

    /// What its tokens are.
    pub fn kind(&self) -> TokenizerKind {
        self.kind
    }

    /// Tokens of a text. What looks like a special token is text like any other.
    pub fn encode(&self, text: &str) -> Vec<u16> {
        match &self.pairs {
            None => text.bytes().map(u16::from).collect(),
            Some(pairs) => split_long_runs(text)
                .into_iter()
                .flat_map(|part| pairs.encode_ordinary(part))
                // All ids are below 50257.
                .map(|token| token as u16)
                .collect(),
        }
    }

    /// The bytes that tokens stand for; UTF-8 as a whole, though a token alone may be a part of a character.
    ///
    /// # Errors
    /// [`TokenizerError::OutOfVocabulary`].
    pub fn decode(&self, tokens: &[u16]) -> Result<Vec<u8>, TokenizerError> {
        let vocabulary = self.kind.vocabulary();
        if let Some(index) = tokens.iter().position(|&token| usize::from(token) >= vocabulary) {
            return Err(TokenizerError::OutOfVocabulary { token: tokens[index], index, vocabulary });
        }
        match &self.pairs {
            None => Ok(tokens.iter().map(|&token| token as u8).collect()),
            Some(pairs) => {
                let tokens: Vec<u32> = tokens.iter().copied().map(u32::from).collect();
                pairs.decode_bytes(&tokens).map_err(|error| TokenizerError::Vocabulary(error.to_string()))
            }
        }
    }

    /// The token that ends a text, where there is one.
    pub fn end_of_text(&self) -> Option<u16> {
        match self.kind {
            TokenizerKind::Bytes => None,
            TokenizerKind::Gpt2 => Some(50256),
        }
    }

    /// An encoder of a text that comes in pieces.
    pub fn encoder(&self) -> Encoder<'_> {
        Encoder { tokenizer: self, pending: String::new() }
    }
}

/// Encodes a text piece by piece, as if it were whole.
///
/// GPT-2's encoding first splits a text into words, and no word holds a white space after anything else; so a text may be
/// cut before a white space that follows something else. What comes after the last such place waits for more. A stretch of
/// [`Encoder::LONGEST`] bytes without such a place, which is no text that people write, is cut where it stands.
pub struct Encoder<'a> {
    tokenizer: &'a Tokenizer,
    pending: String,
}

impl Encoder<'_> {
    /// Bytes that may wait.
    pub const LONGEST: usize = 1 << 20;

    /// Takes a piece; the tokens that are certain now.
    pub fn push(&mut self, piece: &str) -> Vec<u16> {
        if self.tokenizer.kind == TokenizerKind::Bytes {
            return self.tokenizer.encode(piece);
        }
        self.pending.push_str(piece);
        let cut =
            last_cut(&self.pending).or((self.pending.len() >= Self::LONGEST).then_some(self.pending.len()));
        let Some(cut) = cut else { return Vec::new() };
        let tokens = self.tokenizer.encode(&self.pending[..cut]);
        self.pending.drain(..cut);
        tokens
    }

    /// The tokens of what is left.
    pub fn finish(self) -> Vec<u16> {
        self.tokenizer.encode(&self.pending)
    }
}

/// A text cut before the last character of every white space longer than [`LONGEST_RUN_BYTES`] that something follows.
/// GPT-2's encoding ends a word there too, as it leaves one white space for the word after, so the tokens stay the same.
fn split_long_runs(text: &str) -> Vec<&str> {
    let mut parts = Vec::new();
    let (mut start, mut run, mut last) = (0, 0, 0);
    for (index, character) in text.char_indices() {
        if character.is_whitespace() {
            last = index;
            continue;
        }
        if index - run > LONGEST_RUN_BYTES {
            parts.push(&text[start..last]);
            start = last;
        }
        run = index + character.len_utf8();
    }
    parts.push(&text[start..]);
    parts
}

/// The last place before a white space that follows something else.
fn last_cut(text: &str) -> Option<usize> {
    let mut after: Option<(usize, char)> = None;
    for (index, character) in text.char_indices().rev() {
        if let Some((cut, next)) = after
            && next.is_whitespace()
            && !character.is_whitespace()
        {
            return Some(cut);
        }
        after = Some((index, character));
    }
    None
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Letters of several scripts, digits, marks, and every kind of white space.
    fn texts() -> impl Strategy<Value = String> {
        let words = prop_oneof![
            "[a-zA-Z]{1,6}",
            "[0-9]{1,4}",
            "['’.,;!?-]{1,3}",
            "'(s|t|re|ve|m|ll|d)",
            "[ \t\n\r]{1,4}",
            "[\u{A0}\u{2003}\u{3000}\u{85}]{1,2}",
            "[а-яα-ω漢字é]{1,4}",
            "[🌊👩‍🚀]{1,2}",
            "<\\|endoftext\\|>",
        ];
        prop::collection::vec(words, 0..40).prop_map(|words| words.concat())
    }

    proptest! {
        #[test]
        fn pieces_encode_as_the_whole(text in texts(), sizes in prop::collection::vec(1usize..9, 1..6)) {
            thread_local!(static GPT2: Tokenizer = Tokenizer::new(TokenizerKind::Gpt2).unwrap());
            GPT2.with(|tokenizer| {
                let characters: Vec<char> = text.chars().collect();
                let (mut encoder, mut tokens, mut at) = (tokenizer.encoder(), Vec::new(), 0);
                for size in sizes.iter().cycle() {
                    if at >= characters.len() { break }
                    let end = (at + size).min(characters.len());
                    tokens.extend(encoder.push(&characters[at..end].iter().collect::<String>()));
                    at = end;
                }
                tokens.extend(encoder.finish());
                prop_assert_eq!(&tokens, &tokenizer.encode(&text));
                prop_assert_eq!(tokenizer.decode(&tokens).unwrap(), text.as_bytes());
                Ok(())
            })?;
        }
    }

    #[test]
    fn known_encodings() {
        let tokenizer = Tokenizer::new(TokenizerKind::Gpt2).unwrap();
        assert_eq!(tokenizer.encode("Hello world"), [15496, 995]);
        assert_eq!(tokenizer.encode("<|endoftext|>").len(), 7);
        assert_eq!(tokenizer.decode(&[50256]).unwrap(), b"<|endoftext|>");
        let error = tokenizer.decode(&[1, 50257]).unwrap_err().to_string();
        assert_eq!(error, "token 50257 at index 1 is outside of the tokenizer's 50257");
        let bytes = Tokenizer::new(TokenizerKind::Bytes).unwrap();
        assert_eq!(bytes.encode("aé"), [97, 0xC3, 0xA9]);
        assert_eq!(bytes.decode(&[97, 0xC3, 0xA9]).unwrap(), "aé".as_bytes());
        assert!(bytes.decode(&[256]).is_err());
    }

    /// At a length that the regular expression can bear, the tokens are those without any cut.
    #[test]
    fn long_runs_of_white_space_encode_as_the_whole() {
        let tokenizer = Tokenizer::new(TokenizerKind::Gpt2).unwrap();
        let whole = tokenizer.pairs.as_ref().unwrap();
        for [first, last] in
            [[" ", " "], ["\n", " "], [" ", "\n"], ["\u{3000}", "\u{A0}"], ["\r\n", "\u{85}"]]
        {
            for (before, after) in [("", "x"), ("word", "'s  y"), ("1 ", "漢字"), ("é", ""), ("", ".")] {
                let text =
                    format!("{before}{}{last}{after}{}{after}", first.repeat(70_000), first.repeat(70_000));
                assert_eq!(split_long_runs(&text).len(), if after.is_empty() { 1 } else { 3 });
                assert!(tokenizer.encode(&text).into_iter().map(u32::from).eq(whole.encode_ordinary(&text)));
            }
        }
        let longer = " ".repeat(3 << 20) + "x";
        assert_eq!(tokenizer.decode(&tokenizer.encode(&longer)).unwrap(), longer.as_bytes());
    }

    #[test]
    fn a_stretch_without_a_cut_does_not_grow_for_ever() {
        let tokenizer = Tokenizer::new(TokenizerKind::Gpt2).unwrap();
        let mut encoder = tokenizer.encoder();
        let piece = "ab.".repeat(1 << 16);
        let mut tokens = Vec::new();
        for _ in 0..20 {
            tokens.extend(encoder.push(&piece));
            assert!(encoder.pending.len() < Encoder::LONGEST);
        }
        tokens.extend(encoder.finish());
        assert_eq!(tokenizer.decode(&tokens).unwrap(), piece.repeat(20).into_bytes());
    }
}
