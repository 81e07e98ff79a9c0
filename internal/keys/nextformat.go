//go:build nextformat

package keys

// NextFormat is the range that the next format adds: one key, whose value is one byte.
const NextFormat = 0x25
