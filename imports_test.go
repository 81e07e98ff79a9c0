package codeq_test

import (
	"go/ast"
	"go/token"
	"path"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// layers are the packages that know what is stored, and others that share their errors, the lowest
// first. Each imports those below it only, and whatever of internal is in no layer.
var layers = [][]string{
	{"base"}, {"keys", "record", "peer", "inbox", "bulk"}, {"store", "manifest"},
	{"schema", "cluster", "logentry"}, {"conversion"}, {"engine", "fsck", "checkpoint", "permits"},
	{"dispatch", "listing", "call", "taskbatch", "session", "diskspace", "ownerclock"},
	{"broadcast", "claimlines"},
}

func layerOf(name string) int {
	return slices.IndexFunc(layers, func(layer []string) bool { return slices.Contains(layer, name) })
}

// TestImportsRunOneWay: no package imports one of its own layer or above, and what is in no layer
// imports none of them.
func TestImportsRunOneWay(t *testing.T) {
	t.Parallel()
	_, all := sources(t)
	edges := 0
	for dir, files := range all {
		if dir == "." {
			continue
		}
		from := filepath.Base(dir)
		for _, file := range files {
			for _, spec := range file.Imports {
				name, err := strconv.Unquote(spec.Path.Value)
				require.NoError(t, err)
				to := layerOf(path.Base(name))
				if !strings.HasPrefix(name, "codeq/internal/") || to < 0 {
					continue
				}
				edges++
				require.Less(t, to, layerOf(from), "%s imports %s", dir, name)
			}
		}
	}
	require.Greater(t, edges, 8)
	for _, layer := range layers {
		for _, name := range layer {
			require.Contains(t, all, filepath.Join("internal", name))
		}
	}
}

// TestRulesAreDeterministic: the rules of a shard, and the protocol of permits, use no goroutine, lock,
// file, socket, clock or global randomness, and Raft neither.
func TestRulesAreDeterministic(t *testing.T) {
	t.Parallel()
	fset, all := sources(t)
	for _, dir := range []string{"engine", "permits"} {
		files := all[filepath.Join("internal", dir)]
		require.NotEmpty(t, files)
		for _, file := range files {
			requireDeterministic(t, fset, file)
		}
	}
}

func requireDeterministic(t *testing.T, fset *token.FileSet, file *ast.File) {
	for _, spec := range file.Imports {
		name, err := strconv.Unquote(spec.Path.Value)
		require.NoError(t, err)
		first, _, _ := strings.Cut(name, "/")
		require.NotContains(t, []string{"sync", "os", "net"}, first, "%s", fset.Position(spec.Pos()))
		require.NotContains(t, name, "raft", "%s", fset.Position(spec.Pos()))
		require.NotContains(t, []string{"hash/maphash", "crypto/rand", "math/rand"}, name, "%s", fset.Position(spec.Pos()))
	}
	ast.Inspect(file, func(n ast.Node) bool {
		switch n := n.(type) {
		case *ast.GoStmt, *ast.SelectStmt, *ast.SendStmt:
			t.Errorf("%s: a goroutine or a channel", fset.Position(n.Pos()))
		case *ast.SelectorExpr:
			x, ok := n.X.(*ast.Ident)
			if ok && x.Name == "time" && slices.Contains([]string{"Now", "Since", "Until", "After", "AfterFunc", "NewTimer", "NewTicker", "Sleep", "Tick"}, n.Sel.Name) {
				t.Errorf("%s: time.%s", fset.Position(n.Pos()), n.Sel.Name)
			}
			if ok && x.Name == "rand" && n.Sel.Name != "Rand" && !strings.HasPrefix(n.Sel.Name, "New") {
				t.Errorf("%s: rand.%s, of a source that is everybody's", fset.Position(n.Pos()), n.Sel.Name)
			}
		}
		return true
	})
}
