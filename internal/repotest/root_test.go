package repotest

import (
	"os"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"
)

var toRoot sync.Once

// inRoot begins a test with paths relative to the root. It changes the directory once for all
// tests, and not in TestMain, because the cache of test results does not see a change there.
func inRoot(t *testing.T) {
	t.Helper()
	toRoot.Do(func() {
		root, err := Root()
		require.NoError(t, err)
		require.NoError(t, os.Chdir(root))
	})
}
