//go:build !nextformat

package manifest

// Format is the version of all stored and replicated data: the manifest, the keys and the values of
// the shards, the entries of logs.
const Format = 8
