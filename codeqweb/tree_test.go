package codeqweb

import (
	"html"
	"regexp"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// TestTree: JSON is shown as a tree with its texts escaped, numbers as they are written, keys in
// their order, and two levels open.
func TestTree(t *testing.T) {
	tree, cut := treeOf([]byte(` {"b<":1.10e2,"a":[true,null,"x&y\u202e"],"a":{},"deep":{"c":{"d":[]}}}`))
	require.False(t, cut)
	text := html.UnescapeString(regexp.MustCompile(`<[^>]*>`).ReplaceAllString(string(tree), "|"))
	require.Equal(t, `4 keys b< 1.10e2 a 3 items 0 true 1 null 2 "x&y\u202e" a 0 keys deep 1 key c 1 key d 0 items`, strings.Join(strings.FieldsFunc(text, func(r rune) bool { return r == '|' }), " "))
	require.NotContains(t, string(tree), "b<\"")
	require.Equal(t, 4, strings.Count(string(tree), "<details open>"), "itself, and its three nested parts")
	require.Equal(t, 2, strings.Count(string(tree), "<details>"))
	for _, other := range []string{``, `1`, `"text"`, ` null`} {
		tree, _ := treeOf([]byte(other))
		require.Empty(t, tree, other)
	}
}

// TestTreeIsExact: texts are shown as they are, or the JSON is shown as a text.
func TestTreeIsExact(t *testing.T) {
	for _, text := range []string{`["\ud83d\ude00","😀"]`, `["` + strings.Repeat(`\ud83d\ude00`, 9000) + `"]`, `["` + strings.Repeat("é", 90_000) + `"]`, `["x` + strings.Repeat("é", 90_000) + `"]`} {
		tree, _ := treeOf([]byte(text))
		require.NotEmpty(t, tree, text[:20])
		require.NotContains(t, string(tree), "\ufffd")
	}
	d := &Dashboard{}
	for text, shown := range map[string]string{"{\"a\":\"\xff\"}": `\xff`, "{\"\xfe\":1}": `\xfe`, `["\ud83d"]`: `\ud83d`} {
		v := d.tree("", []byte(text))
		require.Empty(t, v.Tree, text)
		require.Equal(t, "JSON", v.Kind)
		require.Contains(t, v.Text, shown)
	}
}

// TestTreeIsCheap: the parts that a tree leaves out are not decoded.
func TestTreeIsCheap(t *testing.T) {
	data := []byte(`{"a":[` + strings.Repeat(`{"k":1,"b":["x",2,3]},`, 50_000) + `1],"b":"` + strings.Repeat("x", 1<<20) + `"}`)
	require.Less(t, testing.AllocsPerRun(1, func() { treeOf(data) }), 10_000.0)
}

// TestTreeIsBounded: large JSON is cut, with the number of values that are left out.
func TestTreeIsBounded(t *testing.T) {
	for name, c := range map[string]struct{ json, says string }{
		"long array":   {"[" + strings.Repeat(`{"sku":"A-1"},`, 99_999) + "1]", "99,900 more are not shown"},
		"long object":  {"{" + strings.Repeat(`"key":[1,2],`, 4999) + `"key":1}`, "4,900 more are not shown"},
		"long text":    {`["` + strings.Repeat("<", 1<<20) + `"]`, "&lt;…"},
		"long key":     {`{"` + strings.Repeat("<", 1<<20) + `":1}`, "&lt;…"},
		"deep":         {strings.Repeat("[", 9000) + strings.Repeat("]", 9000), "1 more are not shown"},
		"wide":         {strings.Repeat("["+strings.Repeat(`[1,2,3],`, 90), 50) + "1" + strings.Repeat("]", 50), "more are not shown"},
		"many objects": {`{"a":[` + strings.Repeat(`{"id":12345,"name":"somebody","tags":["x","y"],"nested":{"a":1,"b":"`+strings.Repeat("y", 100)+`"}},`, 5000) + `1],"last":1}`, "more are not shown"},
	} {
		tree, cut := treeOf([]byte(c.json))
		require.True(t, cut, name)
		require.Contains(t, string(tree), c.says, name)
		require.Less(t, len(tree), 128<<10, name)
		require.Equal(t, strings.Count(string(tree), "<details"), strings.Count(string(tree), "</details>"), name)
	}
}
