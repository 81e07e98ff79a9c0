package repotest

import (
	"go/ast"
	"go/token"
	"slices"
	"strconv"
	"testing"

	"github.com/stretchr/testify/require"
)

// guardFuncs call a function in a guard; their first literal is its name.
var guardFuncs = []string{"inParallel", "contain", "containUser", "guarded", "goFor", "goOn", "goUnlessClosed", "guard.Run", "guard.RunUser", "RunUser", "guard.Contain", "guard.Steps", "Contain", "NewErrand", "guard.NewErrand"}

func calleeOf(call *ast.CallExpr) string {
	switch f := call.Fun.(type) {
	case *ast.Ident:
		return f.Name
	case *ast.SelectorExpr:
		if x, ok := f.X.(*ast.Ident); ok && x.Name == "guard" {
			return "guard." + f.Sel.Name
		}
		return f.Sel.Name
	}
	return ""
}

// GuardNames returns the names of all guards, sorted.
func GuardNames(t testing.TB) (names []string) {
	_, all := Sources(t)
	for _, files := range all {
		for _, file := range files {
			ast.Inspect(file, func(n ast.Node) bool {
				call, ok := n.(*ast.CallExpr)
				if !ok || !slices.Contains(guardFuncs, calleeOf(call)) {
					return true
				}
				for _, arg := range call.Args {
					if lit, ok := arg.(*ast.BasicLit); ok && lit.Kind == token.STRING {
						name, err := strconv.Unquote(lit.Value)
						require.NoError(t, err)
						if !slices.Contains(names, name) {
							names = append(names, name)
						}
						break
					}
				}
				return true
			})
		}
	}
	slices.Sort(names)
	return names
}
