package repotest

import (
	"go/ast"
	"path/filepath"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"
)

// handOn are functions that a goroutine may call outside of its guard: they only pass its outcome
// on.
var handOn = []string{"close", "Done", "Stop", "Wait", "settle", "Fail", "Reply", "encodeError", "EncodeError", "report", "fail", "cancel", "tried", "Pass", "notify", "Errorf"}

// startedBy returns the functions that a package starts: calls in go statements, and arguments of
// Go of a WaitGroup or errgroup, and of AfterFunc.
func startedBy(files []*ast.File) (started []ast.Expr) {
	for _, file := range files {
		ast.Inspect(file, func(n ast.Node) bool {
			switch n := n.(type) {
			case *ast.GoStmt:
				started = append(started, n.Call)
			case *ast.CallExpr:
				if name := calleeOf(n); name == "Go" || name == "AfterFunc" {
					started = append(started, n.Args[len(n.Args)-1])
				}
			}
			return true
		})
	}
	return started
}

// unguarded returns the first call of n that is outside of a guard; "" if there is none.
func unguarded(files []*ast.File, n ast.Node, depth int) (found string) {
	if n == nil || depth > 3 {
		return "something too deep"
	}
	if name, ok := n.(*ast.SelectorExpr); ok { // a method that is started
		return unguardedFunc(files, name.Sel.Name, depth)
	}
	ast.Inspect(n, func(n ast.Node) bool {
		call, ok := n.(*ast.CallExpr)
		if !ok || found != "" {
			return found == ""
		}
		name := calleeOf(call)
		switch {
		case slices.Contains(guardFuncs, name):
			return false
		case name == "", slices.Contains(handOn, name): // a literal, whose calls follow, or no function of ours
			return true
		}
		found = unguardedFunc(files, name, depth)
		return found == ""
	})
	return found
}

func unguardedFunc(files []*ast.File, name string, depth int) string {
	for _, file := range files {
		for _, d := range file.Decls {
			if f, ok := d.(*ast.FuncDecl); ok && f.Name.Name == name && hasGuard(f.Body) {
				return unguarded(files, f.Body, depth+1)
			}
		}
	}
	return name
}

func hasGuard(n ast.Node) (has bool) {
	ast.Inspect(n, func(n ast.Node) bool {
		if call, ok := n.(*ast.CallExpr); ok && slices.Contains(guardFuncs, calleeOf(call)) {
			has = true
		}
		return !has
	})
	return has
}

// TestGoroutinesAreGuarded: no goroutine of codeq is without a guard.
func TestGoroutinesAreGuarded(t *testing.T) {
	t.Parallel()
	inRoot(t)
	n := 0
	fset, all := Sources(t)
	for dir, files := range all {
		if dir == filepath.Join("internal", "testkit") { // is no part of codeq
			continue
		}
		for _, started := range startedBy(files) {
			n++
			if bad := unguarded(files, started, 0); bad != "" {
				t.Errorf("%s: a goroutine calls %s outside of a guard", fset.Position(started.Pos()), bad)
			}
		}
	}
	require.Greater(t, n, 40)
}
