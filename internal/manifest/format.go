//go:build !nextformat

package manifest

// Format is the version of everything that codeq stores and replicates: the manifest, the keys and
// the values of the shards, the entries of logs.
const Format = 7
