"""What the tools of the shard format share. The layout itself is the engine's: it comes in through the C ABI."""
