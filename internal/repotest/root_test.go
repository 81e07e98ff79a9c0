package repotest

import (
	"os"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"
)

var toRoot sync.Once

// inRoot begins a test whose paths are relative to the root. It changes the directory once for all
// tests, and not in TestMain, whose changes the cache of test results does not see.
func inRoot(t *testing.T) {
	t.Helper()
	toRoot.Do(func() {
		root, err := Root()
		require.NoError(t, err)
		require.NoError(t, os.Chdir(root))
	})
}
