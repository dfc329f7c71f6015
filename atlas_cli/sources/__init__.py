"""What a name stands for: references, the Hub, the cache -> local files."""
