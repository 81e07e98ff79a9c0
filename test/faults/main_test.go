// Package faults_test has the tests of disks that fail, fill, lose power or rot under a queue of
// one process, the model of its callers, and tests of leaks after Close.
package faults_test

import (
	"testing"

	"codeq/internal/testkit"
)

func TestMain(m *testing.M) { testkit.Main(m) }
