//go:build nextformat

package manifest

// Format of the build with which tests raise directories, shards and clusters: the format after the
// current one. It adds one key to each shard (keys.NextFormat).
const Format = 8
