package repotest

import (
	"go/ast"
	"go/token"
	"maps"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// layers are the packages that know what is stored, and others that share their errors, the lowest
// first. Each is as high as those that import it allow, and imports those below it only, and
// whatever of internal is in no layer. On top are the API and what uses it.
var layers = [][]string{
	{"internal/base"},
	{"internal/keys", "internal/record"},
	{"internal/store", "internal/manifest"},
	{"internal/convert", "internal/recurrence", "internal/peer", "internal/ready"},
	{"internal/engine", "internal/fsck", "internal/permits", "internal/cluster"},
	{"internal/dispatch", "internal/listing", "internal/call"},
	{"internal/entries", "internal/inspect", "internal/owner", "internal/simtest"},
	{"internal/localsocket", "internal/offline"},
	{"."},
	{"codeqtest", "codeqweb", "codeqprom", "codeqotel", "codeqsql"},
	{"bench", "cmd", "examples"},
}

// besideTheAPI are the internal packages that users of the API may import.
var besideTheAPI = map[string][]string{
	"bench":     {"internal/inspect"},                                       // sets the file system of a Queue
	"codeqtest": {"internal/inspect", "internal/crashfs"},                   // and its clock, and is the disk
	"cmd":       {"internal/offline", "internal/keys", "internal/platform"}, // all that is stored, IDs, files for their owner
}

// layerOf returns the layer of a directory, and which entry of it the directory is of; -1: none.
func layerOf(dir string) (layer int, entry string) {
	for n, entries := range layers {
		for _, entry := range entries {
			if dir == entry || entry != "." && strings.HasPrefix(dir, entry+"/") {
				return n, entry
			}
		}
	}
	return -1, ""
}

// importsOf are the paths that a file imports, by the names that it uses for them.
func importsOf(t *testing.T, file *ast.File) map[string]string {
	names := make(map[string]string)
	for _, spec := range file.Imports {
		imported, err := strconv.Unquote(spec.Path.Value)
		require.NoError(t, err)
		name := path.Base(imported)
		if len(name) > 1 && name[0] == 'v' && strings.Trim(name[1:], "0123456789") == "" { // a major version
			name = path.Base(path.Dir(imported))
		}
		if spec.Name != nil {
			name = spec.Name.Name
		}
		names[name] = imported
	}
	return names
}

// TestImportsRunOneWay: no package imports its own layer or a higher one, and packages without a
// layer import none. Users of the API import besideTheAPI only.
func TestImportsRunOneWay(t *testing.T) {
	t.Parallel()
	inRoot(t)
	_, all := Sources(t, "codeqtest", "codeqweb", "codeqprom", "codeqotel", "codeqsql", "bench", "cmd", "examples")
	edges := 0
	for dir, files := range all {
		from, entry := layerOf(filepath.ToSlash(dir))
		api, _ := layerOf(".")
		for _, file := range files {
			for _, imported := range importsOf(t, file) {
				to, ok := strings.CutPrefix(imported, "codeq/")
				switch {
				case imported == "codeq":
					to = "."
				case !ok:
					continue
				}
				layer, of := layerOf(to)
				if entry == of && from > api { // the parts of bench
					continue
				}
				edges++
				if from > api && strings.HasPrefix(to, "internal/") {
					require.Contains(t, besideTheAPI[entry], to, "%s imports it", dir)
				} else if layer >= 0 {
					require.Less(t, layer, from, "%s imports %s", dir, imported)
				}
			}
		}
	}
	require.Greater(t, edges, 100)
	for _, layer := range layers {
		for _, dir := range layer {
			if dir != "cmd" && dir != "examples" { // which are directories of programs
				require.Contains(t, all, filepath.FromSlash(dir))
			}
		}
	}
}

// TestModulesAgree: all modules of the repository require the same version of a module, so that it
// is tested, measured and built once. The module tools is left out: no program
// of codeq contains its packages, and each tool gets the versions that its authors test it with.
func TestModulesAgree(t *testing.T) {
	t.Parallel()
	inRoot(t)
	versions, needed := make(map[string]map[string][]string), 0 // go.mod files by module and version
	for _, pattern := range []string{"go.mod", "*/go.mod", "*/*/go.mod"} {
		paths, err := filepath.Glob(pattern)
		require.NoError(t, err)
		for _, p := range paths {
			if p == filepath.Join("tools", "go.mod") {
				continue
			}
			text, err := os.ReadFile(p)
			require.NoError(t, err)
			for line := range strings.Lines(string(text)) {
				f := strings.Fields(strings.TrimPrefix(line, "require "))
				if len(f) < 2 || !strings.Contains(f[0], ".") || !strings.HasPrefix(f[1], "v") {
					continue
				}
				if versions[f[0]] == nil {
					versions[f[0]] = make(map[string][]string)
				}
				versions[f[0]][f[1]] = append(versions[f[0]][f[1]], p)
				needed++
			}
		}
	}
	require.Greater(t, needed, len(versions)+100)
	for module, by := range versions {
		require.Len(t, by, 1, "%s: %v", module, by)
	}
}

// pure are the packages that know no world beside their arguments, and all that they import. Of
// time, math/rand/v2 and fmt they use what allowedOf has.
var pure = map[string][]string{
	"engine": {
		"bytes", "cmp", "encoding/json", "errors", "fmt", "maps", "math", "math/bits",
		"reflect", "slices", "strings", "sync/atomic", "time",
		"github.com/cespare/xxhash/v2", "github.com/cockroachdb/pebble/v2",
		"codeq/internal/base", "codeq/internal/container/chunked", "codeq/internal/container/numset", "codeq/internal/container/recent",
		"codeq/internal/container/timeheap", "codeq/internal/container/wheel", "codeq/internal/keys", "codeq/internal/ready",
		"codeq/internal/record", "codeq/internal/recurrence", "codeq/internal/store", "codeq/internal/wire",
	},
	"permits": {"cmp", "math", "time", "codeq/internal/wire"},
	"ready": {
		"bytes", "cmp", "fmt", "math", "math/bits", "reflect", "slices", "sort", "sync/atomic", "time", "github.com/cockroachdb/pebble/v2",
		"codeq/internal/base", "codeq/internal/container/arena", "codeq/internal/keys", "codeq/internal/store",
	},
}

// pureOfStore are the files of store that work for the rules.
var pureOfStore = []string{
	"batchorder.go", "catalogue.go", "daily.go", "deadkinds.go", "due.go", "interests.go", "lanenames.go", "lease.go", "minter.go", "outbox.go", "periodclock.go", "reads.go", "sessions.go", "waiting.go", "writebackcache.go", "writes.go",
}

// allowedOf are the names that the rules use of packages with clocks, files or shared randomness.
var allowedOf = map[string][]string{
	"time":         {"Duration", "Hour", "Millisecond", "RFC3339", "Second", "Time", "UnixMilli"},
	"math/rand/v2": {"New", "NewChaCha8", "Rand"},
	"fmt":          {"Errorf", "Fprintf", "Sprint", "Sprintf"},
	"github.com/cockroachdb/pebble/v2": {
		"Batch", "DB", "DeferredBatchOp", "ErrNotFound", "InternalIterCall", "InternalKeyKind", "InternalKeyKindDelete", "InternalKeyKindRangeDelete",
		"InternalKeyKindSet", "InternalKeyKindSingleDelete", "IterOptions", "IterValid", "Iterator", "Reader",
	},
}

// TestRulesAreDeterministic: the rules of a shard, its ready tasks, and the protocol of permits,
// import what pure lists, and use no goroutine, channel, clock or global randomness.
func TestRulesAreDeterministic(t *testing.T) {
	t.Parallel()
	inRoot(t)
	fset, all := Sources(t)
	for dir, allowed := range pure {
		imported := make(map[string]bool)
		for _, file := range all[filepath.Join("internal", dir)] {
			requireDeterministic(t, fset, file)
			for _, name := range importsOf(t, file) {
				imported[name] = true
			}
		}
		require.ElementsMatch(t, allowed, slices.Collect(maps.Keys(imported)), "imports of %s", dir)
	}
	for _, file := range all[filepath.Join("internal", "store")] {
		if slices.Contains(pureOfStore, filepath.Base(fset.Position(file.Pos()).Filename)) {
			requireDeterministic(t, fset, file)
		}
	}
}

func requireDeterministic(t *testing.T, fset *token.FileSet, file *ast.File) {
	bad := func(n ast.Node, what string) { t.Errorf("%s: %s", fset.Position(n.Pos()), what) }
	names := importsOf(t, file)
	require.NotContains(t, names, ".", "%s", fset.Position(file.Pos()))
	ast.Inspect(file, func(n ast.Node) bool {
		switch n := n.(type) {
		case *ast.GoStmt:
			bad(n, "a goroutine")
		case *ast.SelectStmt, *ast.SendStmt, *ast.ChanType:
			bad(n, "a channel")
		case *ast.UnaryExpr:
			if n.Op == token.ARROW {
				bad(n, "a channel")
			}
		case *ast.CallExpr:
			if f, ok := n.Fun.(*ast.Ident); ok && (f.Name == "close" || f.Name == "println" || f.Name == "print") {
				bad(n, f.Name)
			}
		case *ast.SelectorExpr:
			x, ok := n.X.(*ast.Ident)
			if !ok {
				return true
			}
			if allowed, ok := allowedOf[names[x.Name]]; ok && !slices.Contains(allowed, n.Sel.Name) {
				bad(n, x.Name+"."+n.Sel.Name)
			}
		}
		return true
	})
}
