package repotest

import (
	"bufio"
	"fmt"
	"go/ast"
	"go/constant"
	"go/parser"
	"go/token"
	"go/types"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// numbered are the declarations of constants that are stored, or sent to other nodes: by what
// testdata/numbers.txt calls them, the package and one constant of each.
var numbered = []struct{ kind, dir, first string }{
	{"call", ".", "callProduce"},
	{"error", "internal/call", "codeLeaseCanceled"},
	{"process", "internal/localsocket", "Limits"},
	{"call", "internal/cluster", "kindJoin"},
	{"change", "internal/cluster", "AddNode"},
	{"frame", "internal/peer", "frameRequest"},
	{"use", "internal/peer", "useCalls"},
	{"refusal", "internal/peer", "RefusedVersion"},
	{"range", "internal/keys", "Meta"},
	{"message", "internal/keys", "MsgAdmit"},
	{"lease", "internal/keys", "leaseLocal"},
	{"wakeup", "internal/keys", "WakeUp"},
	{"flag", "internal/record", "ReleaseOnComplete"},
	{"field", "internal/record", "hasHistory"},
	{"state", "internal/record", "Ready"},
	{"ondead", "internal/keys", "HoldOnDead"},
	{"onmissing", "internal/keys", "RunOnMissing"},
	{"missed", "internal/recurrence", "MissedOnce"},
	{"event", "internal/engine", "EventProduced"},
	{"event", "internal/engine", "EventProgress"},
	{"interest", "internal/engine", "WantOutcomes"},
	{"failure", "internal/engine", "FailRetry"},
	{"failure", "internal/engine", "StillRuns"},
	{"alteration", "internal/engine", "AlterPriority"},
}

const numbersFile = "testdata/numbers.txt"

// notNumbered are constants that are declared among the others, and follow from them.
var notNumbered = []string{"_", "endOfRequests", "EndOfChanges", "endOfEvents", "endOfAlterations", "oneByte", "allFlags"}

// TestNumbers: the numbers of operations, and of all else that is stored or sent, stay for good, as
// there are logs and nodes that use them. A new one is added to numbers.txt; one that is not used
// any more stays there with the name "-", and no other takes its number.
func TestNumbers(t *testing.T) {
	inRoot(t)
	now := make(map[string]string) // names by kind and number
	add := func(kind string, number int64, name string) {
		at := fmt.Sprint(kind, " ", number)
		require.NotContains(t, now, at, name)
		now[at] = name
	}
	for code, text := range sentErrors(t) {
		if text != "" {
			add("error", int64(code), text)
		}
	}
	packages := make(map[string]*declared)
	for _, n := range numbered {
		p := packages[n.dir]
		if p == nil {
			p = declaredIn(t, n.dir)
			packages[n.dir] = p
		}
		for _, c := range p.besides(t, n.first) {
			number, ok := constant.Int64Val(c.Val())
			require.True(t, ok, c)
			add(n.kind, number, c.Name())
		}
	}
	f, err := os.Open(numbersFile)
	require.NoError(t, err)
	defer f.Close()
	var lines []string
	for s := bufio.NewScanner(f); s.Scan(); {
		lines = append(lines, s.Text())
		kind, rest, _ := strings.Cut(s.Text(), " ")
		number, name, _ := strings.Cut(rest, " ")
		at := kind + " " + number
		if name == "-" {
			name = ""
		}
		if now[at] != name {
			t.Errorf("%s line %d: %q, now it is %q", numbersFile, len(lines), s.Text(), now[at])
		}
		delete(now, at)
	}
	for at, name := range now {
		t.Errorf("%s lacks a line: %s %s", numbersFile, at, name)
	}
	require.True(t, slices.IsSortedFunc(lines, func(a, b string) int { return compareNumbers(t, a, b) }), "lines are sorted")
}

// errorTexts are the errors of the standard library that are sent.
var errorTexts = map[string]string{
	"fs.ErrExist": fs.ErrExist.Error(), "fs.ErrNotExist": fs.ErrNotExist.Error(), "fs.ErrPermission": fs.ErrPermission.Error(),
}

// sentErrors returns the texts of SentErrors, by code.
func sentErrors(t *testing.T) (sent []string) {
	_, all := Sources(t)
	texts := maps.Clone(errorTexts)
	eachVar(all[filepath.Join("internal", "base")], func(name string, value ast.Expr) {
		if made, ok := value.(*ast.CallExpr); ok && types.ExprString(made.Fun) == "errors.New" {
			text, err := strconv.Unquote(types.ExprString(made.Args[0]))
			require.NoError(t, err)
			texts["base."+name] = text
		}
	})
	eachVar(all[filepath.Join("internal", "call")], func(name string, value ast.Expr) {
		if name != "SentErrors" {
			return
		}
		for code, e := range value.(*ast.CompositeLit).Elts {
			sent = append(sent, texts[types.ExprString(e)])
			require.Equal(t, code == 0, sent[code] == "", "%d", code)
		}
	})
	require.NotEmpty(t, sent)
	return sent
}

// eachVar calls each with the variables of a package that are declared with a value.
func eachVar(files []*ast.File, each func(name string, value ast.Expr)) {
	for _, file := range files {
		for _, d := range file.Decls {
			if d, ok := d.(*ast.GenDecl); ok && d.Tok == token.VAR {
				for _, spec := range d.Specs {
					if v := spec.(*ast.ValueSpec); len(v.Values) == 1 {
						each(v.Names[0].Name, v.Values[0])
					}
				}
			}
		}
	}
}

// compareNumbers orders lines by kind and number.
func compareNumbers(t *testing.T, a, b string) int {
	var kind [2]string
	var number [2]int
	for i, line := range []string{a, b} {
		_, err := fmt.Sscan(line, &kind[i], &number[i])
		require.NoError(t, err, line)
	}
	if kind[0] != kind[1] {
		return strings.Compare(kind[0], kind[1])
	}
	return number[0] - number[1]
}

// declared is the constants of a package.
type declared struct {
	files []*ast.File
	defs  map[*ast.Ident]types.Object
}

func declaredIn(t *testing.T, dir string) *declared {
	p := &declared{defs: make(map[*ast.Ident]types.Object)}
	names, err := filepath.Glob(filepath.Join(dir, "*.go"))
	require.NoError(t, err)
	fset := token.NewFileSet()
	for _, name := range names {
		if strings.HasSuffix(name, "_test.go") {
			continue
		}
		f, err := parser.ParseFile(fset, name, nil, parser.SkipObjectResolution)
		require.NoError(t, err)
		p.files = append(p.files, f)
	}
	conf := types.Config{IgnoreFuncBodies: true, Error: func(error) {}} // imports are missing
	_, _ = conf.Check(dir, fset, p.files, &types.Info{Defs: p.defs})
	return p
}

// besides are the constants of the declaration that begins with the given one.
func (p *declared) besides(t *testing.T, first string) (found []*types.Const) {
	for _, f := range p.files {
		for _, d := range f.Decls {
			d, ok := d.(*ast.GenDecl)
			if !ok || d.Tok != token.CONST {
				continue
			}
			var all []*types.Const
			for _, s := range d.Specs {
				for _, name := range s.(*ast.ValueSpec).Names {
					if c, ok := p.defs[name].(*types.Const); ok && !slices.Contains(notNumbered, c.Name()) {
						all = append(all, c)
					}
				}
			}
			if len(all) > 0 && all[0].Name() == first {
				found = all
			}
		}
	}
	require.NotEmpty(t, found, first)
	return found
}
