// Package faults_test has the tests of a queue in one process on disks that fail, fill up, lose
// power or have damaged data, the model of its callers, and tests of leaks after Close.
package faults_test

import (
	"testing"

	"codeq/internal/testkit"
)

func TestMain(m *testing.M) { testkit.Main(m) }
