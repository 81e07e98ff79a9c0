//go:build nextformat

package manifest

// Format is the next format, in a build for tests of upgrades. It adds one key to each shard
// (keys.NextFormat).
const Format = 9
