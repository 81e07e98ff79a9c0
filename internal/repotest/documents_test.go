package repotest

import (
	"bytes"
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"unicode"
	"unicode/utf8"

	"github.com/stretchr/testify/require"
)

// codeNames are the names in the Go files below the working directory.
type codeNames struct {
	paths    map[string]bool // files and directories, and imported packages
	used     map[string]bool // identifiers
	owners   map[string]bool // types and packages
	declared map[string]bool // as in Queue.Close, codeq.Queue.Close, codeq.Close; and in queue.go:Close
}

// namesOfCode reads the names once for all tests. REQUIRES: inRoot was called.
var namesOfCode = sync.OnceValues(func() (*codeNames, error) {
	names := &codeNames{make(map[string]bool), make(map[string]bool), make(map[string]bool), make(map[string]bool)}
	return names, filepath.WalkDir(".", func(path string, e fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		names.paths[filepath.ToSlash(path)] = true
		if e.IsDir() || filepath.Ext(path) != ".go" {
			return nil
		}
		file, err := parser.ParseFile(token.NewFileSet(), path, nil, parser.SkipObjectResolution)
		if err == nil {
			names.read(filepath.ToSlash(path), file)
		}
		return err
	})
})

func (n *codeNames) read(at string, file *ast.File) {
	for _, spec := range file.Imports {
		name, _ := strconv.Unquote(spec.Path.Value)
		n.paths[name] = true
	}
	pkg := file.Name.Name
	n.owners[pkg] = true
	add := func(name, of string) {
		n.declared[at+":"+name], n.declared[pkg+"."+name] = true, true
		if of != "" {
			n.declared[of+"."+name], n.declared[pkg+"."+of+"."+name] = true, true
		}
	}
	ast.Inspect(file, func(node ast.Node) bool {
		switch node := node.(type) {
		case *ast.Ident:
			n.used[node.Name] = true
		case *ast.FuncDecl:
			add(node.Name.Name, receiver(node))
		case *ast.ValueSpec:
			for _, name := range node.Names {
				add(name.Name, "")
			}
		case *ast.TypeSpec:
			add(node.Name.Name, "")
			n.owners[node.Name.Name] = true
			var members *ast.FieldList
			switch typ := node.Type.(type) {
			case *ast.StructType:
				members = typ.Fields
			case *ast.InterfaceType:
				members = typ.Methods
			default:
				return true
			}
			for _, m := range members.List {
				for _, name := range m.Names {
					add(name.Name, node.Name.Name)
				}
			}
		}
		return true
	})
}

// receiver returns the type of a method; "" for a function.
func receiver(f *ast.FuncDecl) string {
	if f.Recv == nil {
		return ""
	}
	typ := f.Recv.List[0].Type
	for {
		switch t := typ.(type) {
		case *ast.StarExpr:
			typ = t.X
		case *ast.IndexExpr:
			typ = t.X
		case *ast.IndexListExpr:
			typ = t.X
		case *ast.Ident:
			return t.Name
		}
	}
}

// has reports whether a path exists; if it need not be full, as the end of one.
func (n *codeNames) has(name string, full bool) bool {
	if full || n.paths[name] {
		return n.paths[name]
	}
	for p := range n.paths {
		if strings.HasSuffix(p, "/"+name) {
			return true
		}
	}
	return false
}

// isIn reports whether a file declares a name, of any type.
func (n *codeNames) isIn(file, name string) bool {
	name = name[strings.LastIndex(name, ".")+1:]
	return n.declared[file+":"+name] || n.declared["internal/"+file+":"+name]
}

// notGo are names in the documents that Go files contain in strings only.
var notGo = map[string]bool{"CODEQ": true, "LOCK": true, "SEAL": true, "PLACE": true}

// TestNamesInDocuments: the files, functions, types, fields and tests that CONTRIBUTING.md and the
// chapters of docs/architecture name exist, and a name is in the file that it stands beside, in
// parentheses.
func TestNamesInDocuments(t *testing.T) {
	t.Parallel()
	inRoot(t)
	names, err := namesOfCode()
	require.NoError(t, err)
	quoted := regexp.MustCompile("`([^`\n]+)`")
	isName := regexp.MustCompile(`^[A-Za-z_]\w*(\.[A-Za-z_]\w*)*$`)
	isPath := regexp.MustCompile(`^[\w.]+(/[\w.]+)+$|^\w+\.(go|md|txt)$`)
	fileOf := regexp.MustCompile("`(\\w+\\.\\w+)`\\s+\\(`([\\w/]+\\.go)`\\)")
	inFile := regexp.MustCompile("(?s)`([\\w/]+\\.go)`\\s+\\(([^)]*)\\)")
	chapters, err := filepath.Glob("docs/architecture/*.md")
	require.NoError(t, err)
	require.Len(t, chapters, 5)
	for _, document := range append(chapters, "CONTRIBUTING.md") {
		full := document == "CONTRIBUTING.md"
		raw, err := os.ReadFile(document)
		require.NoError(t, err)
		text := regexp.MustCompile("(?s)```.*?```").ReplaceAllString(string(raw), "")
		found := 0
		for _, m := range quoted.FindAllStringSubmatch(text, -1) {
			name := strings.TrimSuffix(strings.TrimPrefix(m[1], "*"), "()")
			found++
			switch {
			case notGo[name] || strings.Contains(name, "NAME"):
			case isPath.MatchString(name):
				require.True(t, names.has(name, full), "%s: %s does not exist", document, name)
			case isName.MatchString(name):
				if of, _, ok := strings.Cut(name, "."); ok && names.owners[of] {
					require.True(t, names.declared[name], "%s: %s is not declared", document, name)
				}
				last := name[strings.LastIndex(name, ".")+1:]
				require.True(t, names.used[last] || names.has(last, false), "%s: nothing is named %s", document, name)
			default:
				found--
			}
		}
		require.Greater(t, found, 10)
		for _, m := range fileOf.FindAllStringSubmatch(text, -1) {
			require.True(t, names.isIn(m[2], m[1]), "%s: %s is not in %s", document, m[1], m[2])
		}
		for _, m := range inFile.FindAllStringSubmatch(text, -1) {
			for _, name := range quoted.FindAllStringSubmatch(m[2], -1) {
				if isName.MatchString(name[1]) && !isPath.MatchString(name[1]) {
					require.True(t, names.isIn(m[1], name[1]), "%s: %s is not in %s", document, name[1], m[1])
				}
			}
		}
	}
}

// TestLinks: the links between documents lead to files and headings that exist.
func TestLinks(t *testing.T) {
	t.Parallel()
	inRoot(t)
	link := regexp.MustCompile(`\]\(([^)\s]+)\)`)
	code := regexp.MustCompile("(?s)```.*?```|`[^`\n]*`")
	found := 0
	require.NoError(t, filepath.WalkDir(".", func(path string, e fs.DirEntry, err error) error {
		if err != nil || filepath.Ext(path) != ".md" {
			return err
		}
		text, err := os.ReadFile(path)
		require.NoError(t, err)
		for _, m := range link.FindAllStringSubmatch(code.ReplaceAllString(string(text), ""), -1) {
			if strings.Contains(m[1], "://") {
				continue
			}
			to, anchor, _ := strings.Cut(m[1], "#")
			target := filepath.Join(filepath.Dir(path), filepath.FromSlash(to))
			if to == "" {
				target = path
			}
			found++
			if _, err := os.Stat(target); err != nil {
				t.Errorf("%s: %v", path, err)
			} else if anchor != "" && !slices.Contains(anchorsOf(t, target), anchor) {
				t.Errorf("%s: %s has no heading %s", path, target, anchor)
			}
		}
		return nil
	}))
	require.Greater(t, found, 50)
}

// anchorsOf returns the names of the headings of a document in links.
func anchorsOf(t *testing.T, document string) (anchors []string) {
	text, err := os.ReadFile(document)
	require.NoError(t, err)
	for line := range strings.Lines(string(text)) {
		if heading, ok := strings.CutPrefix(strings.TrimLeft(line, "#"), " "); ok && line[0] == '#' {
			anchors = append(anchors, strings.Map(func(r rune) rune {
				switch {
				case r == ' ':
					return '-'
				case r == '-' || r == '_' || unicode.IsLetter(r) || unicode.IsDigit(r):
					return unicode.ToLower(r)
				}
				return -1
			}, strings.TrimSpace(heading)))
		}
	}
	return anchors
}

// maxWidth is how many columns a line of a comment or of a document may have; a tab has 4.
const maxWidth = 100

// TestLineWidth: whole lines of comments, and the prose of documents, are not longer. Tables, code,
// and what programs have written may be.
func TestLineWidth(t *testing.T) {
	t.Parallel()
	inRoot(t)
	width := func(line string) int { return utf8.RuneCountInString(strings.ReplaceAll(line, "\t", "    ")) }
	generated, err := filepath.Glob("bench/results/*.md")
	require.NoError(t, err)
	generated = slices.DeleteFunc(generated, func(name string) bool { return slices.Contains(byHand, filepath.Base(name)) })
	comments, prose := 0, 0
	require.NoError(t, filepath.WalkDir(".", func(path string, e fs.DirEntry, err error) error {
		ext := filepath.Ext(path)
		if err != nil || e.IsDir() || ext != ".go" && ext != ".md" || slices.Contains(generated, path) {
			return err
		}
		text, err := os.ReadFile(path)
		require.NoError(t, err)
		inCode, quoted := false, false
		n := 0
		for line := range strings.Lines(string(text)) {
			n++
			line = strings.TrimSuffix(line, "\n")
			if ext == ".go" {
				if comment := strings.TrimLeft(line, "\t"); !strings.HasPrefix(comment, "// ") {
					continue
				}
				comments++
			} else {
				switch {
				case strings.HasPrefix(line, "```"):
					inCode = !inCode
				case strings.HasPrefix(line, "<!-- from "):
					quoted = true
				case strings.HasPrefix(line, "<!-- end "):
					quoted = false
				}
				if inCode || quoted || strings.HasPrefix(line, "|") || strings.HasPrefix(line, "    ") {
					continue
				}
				prose++
			}
			if width(line) > maxWidth {
				t.Errorf("%s:%d: %d columns", path, n, width(line))
			}
		}
		return nil
	}))
	require.Greater(t, comments, 10_000)
	require.Greater(t, prose, 1_000)
}

// byHand are the documents of bench/results that no program has written.
var byHand = []string{"README.md", "depth.md", "odd-loads.md", "space.md"}

// TestGuide: the guide is short, and its code is part of a program that is compiled and tested.
func TestGuide(t *testing.T) {
	t.Parallel()
	inRoot(t)
	guide, err := os.ReadFile("docs/guide.md")
	require.NoError(t, err)
	require.LessOrEqual(t, bytes.Count(guide, []byte("\n")), 150)
	program, err := os.ReadFile("codeqtest/guide_test.go")
	require.NoError(t, err)
	blocks := regexp.MustCompile("(?s)```go\n(.*?)```").FindAllSubmatch(guide, -1)
	require.Len(t, blocks, bytes.Count(guide, []byte("```"))/2, "all code is Go")
	require.Greater(t, len(blocks), 4)
	for _, block := range blocks {
		require.Contains(t, string(program), "\n"+string(block[1]))
	}
}

// TestDocumentsAreShort: a newcomer reads the README, and a maintainer all of them.
func TestDocumentsAreShort(t *testing.T) {
	t.Parallel()
	inRoot(t)
	for file, lines := range map[string]int{"README.md": 220, "bench/results/README.md": 60} {
		text, err := os.ReadFile(file)
		require.NoError(t, err)
		require.LessOrEqual(t, bytes.Count(text, []byte("\n")), lines, file)
	}
	words := 0
	for _, pattern := range []string{"*.md", "docs/*.md", "docs/*/*.md"} {
		files, err := filepath.Glob(pattern)
		require.NoError(t, err)
		require.NotEmpty(t, files)
		for _, file := range files {
			if file != "CHANGELOG.md" {
				text, err := os.ReadFile(file)
				require.NoError(t, err)
				words += len(bytes.Fields(text))
			}
		}
	}
	require.LessOrEqual(t, words, 22_000)
}

// TestMakeTargets: the table in CONTRIBUTING.md has exactly the targets of the Makefile.
func TestMakeTargets(t *testing.T) {
	t.Parallel()
	inRoot(t)
	makefile, err := os.ReadFile("Makefile")
	require.NoError(t, err)
	phony := regexp.MustCompile(`(?m)^\.PHONY: (.*)$`).FindSubmatch(makefile)
	require.NotNil(t, phony)
	document, err := os.ReadFile("CONTRIBUTING.md")
	require.NoError(t, err)
	_, table, _ := strings.Cut(string(document), "| target |")
	table, _, _ = strings.Cut(table, "\n\n")
	var named []string
	for _, row := range strings.Split(table, "\n")[2:] {
		for _, target := range regexp.MustCompile("`make ([\\w-]+)`").FindAllStringSubmatch(strings.Split(row, "|")[1], -1) {
			named = append(named, target[1])
			require.Regexp(t, "(?m)^"+target[1]+":", string(makefile))
		}
	}
	require.ElementsMatch(t, strings.Fields(string(phony[1])), named)
}
