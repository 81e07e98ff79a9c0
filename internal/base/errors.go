// Package base has the errors that inner packages return and users branch on. Package codeq
// publishes them, and documents what they mean.
package base

import "errors"

var (
	// ErrCorrupt is that stored data is damaged, or contradicts itself.
	ErrCorrupt = errors.New("codeq: stored data is corrupt")
)
