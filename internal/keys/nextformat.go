//go:build nextformat

package keys

// NextFormat is the range that the next format adds: one key with a value of one byte.
const NextFormat = 0x27
