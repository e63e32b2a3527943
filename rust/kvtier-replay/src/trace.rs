//! A trace: requests, each a chain of blocks.

use kvtier_core::policy::Handle;

const NONE: Handle = Handle::MAX;

/// Requests in order of arrival. Blocks are numbered densely from 0, and serve as handles.
#[derive(Clone, Debug)]
pub struct Trace {
    blocks: Vec<Handle>,
    /// Where each request begins in `blocks`, and where the last one ends.
    starts: Vec<usize>,
    tokens: Vec<u64>,
    seconds: Vec<f64>,
    parents: Vec<Handle>,
    /// The blocks that follow each, one block's after another's, and where each one's begin.
    children: Vec<Handle>,
    families: Vec<usize>,
    /// Tokens in a block.
    pub block_tokens: u64,
}

impl Trace {
    /// From all requests' blocks one after the other, the length of each chain, its prompt's tokens
    /// and its time of arrival. The error says what is wrong.
    pub fn new(
        blocks: Vec<Handle>,
        lengths: &[usize],
        tokens: Vec<u64>,
        seconds: Vec<f64>,
        block_tokens: u64,
    ) -> Result<Self, String> {
        let total: usize = lengths.iter().sum();
        if total != blocks.len() || tokens.len() != lengths.len() || seconds.len() != lengths.len()
        {
            return Err(format!(
                "{} blocks, {} lengths (of {total} blocks), {} token counts and {} times were given; they must describe the same requests",
                blocks.len(),
                lengths.len(),
                tokens.len(),
                seconds.len()
            ));
        }
        if block_tokens == 0 {
            return Err("0 tokens a block were given; at least 1 is needed".into());
        }
        let unique = blocks.iter().max().map_or(0, |&max| max as usize + 1);
        let mut starts = Vec::with_capacity(lengths.len() + 1);
        starts.push(0);
        let mut parents = vec![NONE; unique];
        let mut seen = vec![false; unique];
        let mut at = 0;
        for &length in lengths {
            let mut parent = NONE;
            for &block in &blocks[at..at + length] {
                if !std::mem::replace(&mut seen[block as usize], true) {
                    parents[block as usize] = parent;
                }
                parent = block;
            }
            at += length;
            starts.push(at);
        }
        if let Some(missing) = seen.iter().position(|seen| !seen) {
            return Err(format!(
                "block {missing} does not occur, but a larger number does; number the blocks densely from 0"
            ));
        }
        let mut families = vec![0; unique + 1];
        for &parent in parents.iter().filter(|&&parent| parent != NONE) {
            families[parent as usize + 1] += 1;
        }
        for at in 0..unique {
            families[at + 1] += families[at];
        }
        let mut next = families.clone();
        let mut children = vec![0; families[unique]];
        for (block, &parent) in (0..).zip(&parents) {
            if parent != NONE {
                children[next[parent as usize]] = block;
                next[parent as usize] += 1;
            }
        }
        Ok(Trace {
            blocks,
            starts,
            tokens,
            seconds,
            parents,
            children,
            families,
            block_tokens,
        })
    }

    /// Requests.
    pub fn len(&self) -> usize {
        self.tokens.len()
    }

    /// There is no request.
    pub fn is_empty(&self) -> bool {
        self.tokens.is_empty()
    }

    /// Different blocks.
    pub fn unique(&self) -> usize {
        self.parents.len()
    }

    /// Blocks of all requests.
    pub fn references(&self) -> usize {
        self.blocks.len()
    }

    /// Tokens of all prompts.
    pub fn total_tokens(&self) -> u64 {
        self.tokens.iter().sum()
    }

    /// The chain of a request, from its head.
    pub fn chain(&self, request: usize) -> &[Handle] {
        &self.blocks[self.starts[request]..self.starts[request + 1]]
    }

    /// Tokens of a request's prompt; the last of them may not fill a block.
    pub fn tokens(&self, request: usize) -> u64 {
        self.tokens[request]
    }

    /// When a request arrived.
    pub fn seconds(&self, request: usize) -> f64 {
        self.seconds[request]
    }

    /// The block before this one in its chain.
    pub fn parent(&self, block: Handle) -> Option<Handle> {
        Some(self.parents[block as usize]).filter(|&parent| parent != NONE)
    }

    /// The blocks that follow this one in some chain.
    pub(crate) fn children(&self, block: Handle) -> &[Handle] {
        &self.children[self.families[block as usize]..self.families[block as usize + 1]]
    }

    /// Every reference in order.
    pub(crate) fn blocks(&self) -> &[Handle] {
        &self.blocks
    }
}
