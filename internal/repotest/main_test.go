package repotest

import (
	"fmt"
	"os"
	"testing"
)

// TestMain runs the tests in the root, so that all paths are relative to it.
func TestMain(m *testing.M) {
	root, err := Root()
	if err == nil {
		err = os.Chdir(root)
	}
	if err != nil {
		fmt.Println(err)
		os.Exit(1)
	}
	os.Exit(m.Run())
}
