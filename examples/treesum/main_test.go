//go:build linux

package main

import (
	"bytes"
	"context"
	"crypto/sha256"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"

	"codeq"
)

// sum runs the command in this process.
func sum(args ...string) (stdout, stderr string, code int) {
	var out, errs bytes.Buffer
	code = run(context.Background(), args, &out, &errs)
	return out.String(), errs.String(), code
}

// expected returns the output of sha256sum for the regular files below arg, without those below the
// paths to skip.
func expected(t *testing.T, arg string, skip ...string) string {
	t.Helper()
	lines := make(map[string]string)
	err := filepath.WalkDir(arg, func(path string, e fs.DirEntry, err error) error {
		switch {
		case err != nil:
			return err
		case slices.Contains(skip, path):
			return filepath.SkipDir
		case !e.Type().IsRegular():
			return nil
		}
		content, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		if arg == "." {
			path = "./" + path
		}
		line := fmt.Sprintf("%x  ", sha256.Sum256(content))
		if strings.ContainsAny(path, "\\\n") {
			line = `\` + line
		}
		for _, c := range []byte(path) {
			switch c {
			case '\\':
				line += `\\`
			case '\n':
				line += `\n`
			default:
				line += string([]byte{c})
			}
		}
		lines[path] = line + "\n"
		return nil
	})
	require.NoError(t, err)
	var paths []string
	for path := range lines {
		paths = append(paths, path)
	}
	slices.Sort(paths)
	var all strings.Builder
	for _, path := range paths {
		all.WriteString(lines[path])
	}
	return all.String()
}

func write(t *testing.T, path, content string) {
	t.Helper()
	require.NoError(t, os.MkdirAll(filepath.Dir(path), 0o755))
	require.NoError(t, os.WriteFile(path, []byte(content), 0o644))
}

// strangeTree is a tree with every kind of name and entry. Systems other than Linux refuse some of
// them.
func strangeTree(t *testing.T) string {
	t.Helper()
	root := filepath.Join(t.TempDir(), "tree")
	for i, name := range []string{
		"plain", "with space", " leading", "-dash", "-", "dot.", "..dots", "%s", `"quoted"`,
		"grüße-日本", "invalid \xff utf-8", "new\nline", "\n", `back\slash`, `\`, "both\\\n",
		"x.txt", "x-", "x/inner", "x0", // '-' and '.' sort before the separator, '0' after
		"a/b/c/d/e/deep", "a/b/c/shallow", "dir with\nnewline/file", `dir\/file`,
	} {
		write(t, filepath.Join(root, name), strings.Repeat(fmt.Sprintln("content", i), i))
	}
	write(t, filepath.Join(root, "empty"), "")
	write(t, filepath.Join(root, "large"), strings.Repeat("0123456789", 300_000))
	require.NoError(t, os.Mkdir(filepath.Join(root, "empty dir"), 0o755))
	require.NoError(t, os.Symlink("plain", filepath.Join(root, "link to file")))
	require.NoError(t, os.Symlink("x", filepath.Join(root, "link to dir")))
	require.NoError(t, os.Symlink("nowhere", filepath.Join(root, "link to nothing")))
	require.NoError(t, os.Symlink("..", filepath.Join(root, "x/link up")))
	require.NoError(t, syscall.Mkfifo(filepath.Join(root, "fifo"), 0o644))
	return root
}

func TestOutput(t *testing.T) {
	t.Setenv("XDG_CACHE_HOME", t.TempDir())
	root := strangeTree(t)
	t.Chdir(root)
	file := filepath.Join(root, "new\nline")
	for _, arg := range []string{".", root, root + "/", "../tree", "x", "empty dir", "link to dir/", file, "plain"} {
		t.Run(arg, func(t *testing.T) {
			want := expected(t, arg)
			stdout, stderr, code := sum(arg)
			require.Empty(t, stderr)
			require.Zero(t, code)
			require.Equal(t, want, stdout)
			require.Equal(t, sha256sum(t, arg), stdout)
		})
	}
	t.Run("the tree is . by default", func(t *testing.T) {
		stdout, _, code := sum()
		require.Zero(t, code)
		require.Equal(t, expected(t, "."), stdout)
	})
}

// sha256sum returns the output of the real tools. The test goes on without them if they are
// missing.
func sha256sum(t *testing.T, arg string) string {
	t.Helper()
	version, _ := exec.Command("sha256sum", "--version").Output()
	if !bytes.Contains(version, []byte("GNU coreutils")) {
		t.Skip("no sha256sum of GNU coreutils")
	}
	cmd := exec.Command("sh", "-c", `find "$0" -type f -print0 | LC_ALL=C sort -z | xargs -r -0 sha256sum`, arg)
	out, err := cmd.Output()
	require.NoError(t, err)
	return string(out)
}

// listen makes the hooks of the handlers call f, one at a time, for this test.
func listen(t *testing.T, f func(tr *tree, event, name string)) {
	var mu sync.Mutex
	hook := func(event string) func(*tree, string) {
		return func(tr *tree, name string) {
			mu.Lock()
			defer mu.Unlock()
			f(tr, event, name)
		}
	}
	walk, hash := onWalk, onHash
	onWalk, onHash = hook("walk"), hook("hash")
	t.Cleanup(func() { onWalk, onHash = walk, hash })
}

func TestHugeDirectory(t *testing.T) {
	dir := t.TempDir()
	root, queue := filepath.Join(dir, "tree"), filepath.Join(dir, "queue")
	for i := range pageSize + 1234 {
		write(t, filepath.Join(root, "huge", fmt.Sprint(i)), fmt.Sprint(i%7))
	}
	pages := 0
	listen(t, func(_ *tree, event, name string) {
		if event == "walk" && name == "huge" {
			pages++
		}
	})
	stdout, _, code := sum("-queue", queue, root)
	require.Zero(t, code)
	require.Equal(t, expected(t, root), stdout)
	require.Equal(t, 2, pages)
}

func TestQueueIsRemovedUnlessKept(t *testing.T) {
	cache := t.TempDir()
	t.Setenv("XDG_CACHE_HOME", cache)
	root := strangeTree(t)
	want := expected(t, root)
	left := func() []string {
		found, err := filepath.Glob(filepath.Join(cache, "treesum", "*"))
		require.NoError(t, err)
		return found
	}
	stdout, _, _ := sum(root)
	require.Equal(t, want, stdout)
	require.Empty(t, left())

	stdout, _, _ = sum("-keep", root)
	require.Equal(t, want, stdout)
	require.Len(t, left(), 1)

	listen(t, func(_ *tree, event, name string) { t.Errorf("%s %q again", event, name) })
	write(t, filepath.Join(root, "later"), "not in the kept result")
	t.Chdir(filepath.Dir(root))
	stdout, _, _ = sum("tree/") // another name of it
	require.Equal(t, strings.ReplaceAll(want, "  "+root, "  tree"), stdout)
	require.Empty(t, left())
}

// A process that dies while it removes the queue leaves half of it under another name, which the
// next run removes.
func TestHalfRemovedQueue(t *testing.T) {
	root := strangeTree(t)
	queue := filepath.Join(t.TempDir(), "queue")
	write(t, filepath.Join(queue+removed, "CODEQ"), "half of a queue")
	stdout, _, code := sum("-queue", queue+"/", root)
	require.Zero(t, code)
	require.Equal(t, expected(t, root), stdout)
	require.NoDirExists(t, queue+removed)
	require.NoDirExists(t, queue)
}

// A process may die between any two steps of the beginning.
func TestDeathAtTheBeginning(t *testing.T) {
	root := strangeTree(t)
	for name, steps := range map[string]func(c *config){
		"after Open": func(c *config) {
			tr, err := openTree(c)
			require.NoError(t, err)
			require.NoError(t, tr.queue.Close())
		},
		"after begin": func(c *config) {
			tr, err := openTree(c)
			require.NoError(t, err)
			require.NoError(t, tr.begin())
			require.NoError(t, tr.begin(), "begins once")
			require.NoError(t, tr.queue.Close())
		},
	} {
		t.Run(name, func(t *testing.T) {
			queue := filepath.Join(t.TempDir(), "queue")
			steps(&config{tree: root, queue: queue})
			stdout, _, code := sum("-queue", queue, root)
			require.Zero(t, code)
			require.Equal(t, expected(t, root), stdout)
		})
	}
}

func TestQueueInsideTheTree(t *testing.T) {
	root := strangeTree(t)
	queue := filepath.Join(root, "x", "queue")
	want := expected(t, root)
	for range 2 {
		stdout, stderr, code := sum("-keep", "-queue", queue, root)
		require.Empty(t, stderr)
		require.Zero(t, code)
		require.Equal(t, want, stdout)
	}
	require.Equal(t, want, expected(t, root, queue))
}

func TestForeignDirectories(t *testing.T) {
	root, queue := strangeTree(t), filepath.Join(t.TempDir(), "queue")
	t.Run("not a queue", func(t *testing.T) {
		stdout, stderr, code := sum("-queue", root, filepath.Join(root, "x"))
		require.Equal(t, exitFailed, code)
		require.Empty(t, stdout)
		require.Contains(t, stderr, strings.TrimPrefix(codeq.ErrNotQueue.Error(), "codeq: "))
		require.FileExists(t, filepath.Join(root, "plain"))
	})
	t.Run("the tree itself", func(t *testing.T) {
		empty := t.TempDir()
		_, stderr, code := sum("-queue", empty, empty)
		require.Equal(t, exitFailed, code)
		require.Contains(t, stderr, "the queue cannot be the tree")
	})
	t.Run("of another tree", func(t *testing.T) {
		_, _, code := sum("-keep", "-queue", queue, root)
		require.Zero(t, code)
		stdout, stderr, code := sum("-queue", queue, filepath.Join(root, "x"))
		require.Equal(t, exitFailed, code)
		require.Empty(t, stdout)
		require.Contains(t, stderr, "is that of "+root)
		require.DirExists(t, queue)
	})
	t.Run("in use", func(t *testing.T) {
		tr, err := openTree(&config{tree: root, queue: queue})
		require.NoError(t, err)
		defer func() { require.NoError(t, tr.queue.Close()) }()
		_, stderr, code := sum("-queue", queue, root)
		require.Equal(t, exitFailed, code)
		require.Contains(t, stderr, strings.TrimPrefix(codeq.ErrLocked.Error(), "codeq: "))
	})
}

func TestFlags(t *testing.T) {
	root, queue := strangeTree(t), filepath.Join(t.TempDir(), "queue")
	for _, d := range []string{"process", "disk", "none"} {
		stdout, _, code := sum("-durability", d, "-workers", "1", "-queue", queue, root)
		require.Zero(t, code)
		require.Equal(t, expected(t, root), stdout)
	}
	for _, wrong := range [][]string{
		{"-durability", "perhaps"}, {"-workers", "x"}, {"-workers", "-1"}, {"-unknown"},
		{root, root}, {filepath.Join(root, "missing")}, {filepath.Join(root, "link to dir")},
	} {
		stdout, stderr, code := sum(append([]string{"-queue", queue}, wrong...)...)
		require.Equal(t, exitFailed, code, wrong)
		require.Empty(t, stdout)
		require.NotEmpty(t, stderr)
	}
	_, stderr, code := sum("-help")
	require.Zero(t, code)
	require.Contains(t, stderr, "usage: treesum")
}

// A file that is removed between the walk and its own task cannot be read, not even by root.
func TestUnreadable(t *testing.T) {
	root, queue := strangeTree(t), filepath.Join(t.TempDir(), "queue")
	read := make(map[string]int)
	listen(t, func(_ *tree, event, name string) {
		read[name]++
		if event == "hash" && name == "plain" || event == "walk" && name == "x" {
			require.NoError(t, os.RemoveAll(filepath.Join(root, name)))
		}
	})
	stdout, stderr, code := sum("-queue", queue, root)
	require.Equal(t, exitUnread, code)
	require.Equal(t, expected(t, root), stdout)
	require.Equal(t,
		fmt.Sprintf("treesum: %[1]s/plain: %[2]v\ntreesum: %[1]s/x: %[2]v\n", root, syscall.ENOENT), stderr)
	require.Equal(t, tries, read["plain"])
	require.Equal(t, tries, read["x"])
	require.Equal(t, 1, read["empty"])
	require.NoDirExists(t, queue)
}

func TestInterrupt(t *testing.T) {
	const files, workers = 200, 3
	root, queue := filepath.Join(t.TempDir(), "tree"), filepath.Join(t.TempDir(), "queue")
	for i := range files {
		write(t, filepath.Join(root, fmt.Sprint(i%7), fmt.Sprint(i)), fmt.Sprint(i))
	}
	ctx, interrupt := context.WithCancel(context.Background())
	read := make(map[string]int)
	hashed := 0
	listen(t, func(_ *tree, event, name string) {
		if event == "hash" {
			read[name]++
			if hashed++; hashed == files/2 {
				interrupt()
			}
		}
	})
	args := []string{"-workers", fmt.Sprint(workers), "-queue", queue, root}
	var stdout, stderr bytes.Buffer
	require.Equal(t, exitInterrupted, run(ctx, args, &stdout, &stderr))
	require.Empty(t, stdout.String())
	require.Contains(t, stderr.String(), "the same command goes on from here (queue: "+queue+")")

	out, errs, code := sum(args...)
	require.Zero(t, code)
	require.Empty(t, errs)
	require.Equal(t, expected(t, root), out)
	require.Len(t, read, files)
	require.LessOrEqual(t, hashed, files+workers, "only what was being read is read again")
}
