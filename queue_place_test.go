package codeq_test

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"math/rand/v2"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/stretchr/testify/require"

	"codeq"
	"codeq/internal/manifest"
	"codeq/internal/testkit"
	"codeq/test/queuetest"
)

func copyDirectory(t *testing.T, from, to string) {
	t.Helper()
	testkit.CopyDirectory(t, from, to)
}

// leaveOpen gives the directory of a closed queue the state that the end of its process leaves.
func leaveOpen(t *testing.T, dir, node string) {
	t.Helper()
	d, err := manifest.Open(vfs.Default, dir, manifest.Want{Node: node})
	require.NoError(t, err)
	require.NoError(t, d.Begin())
	require.NoError(t, d.Close())
}

// TestCopyOfOpenQueue: a copy that was made while the queue was open, or after its process had
// died, is refused unless AcceptCopy is set. A renamed directory is not refused.
func TestCopyOfOpenQueue(t *testing.T) {
	t.Parallel()
	if runtime.GOOS == "windows" {
		t.Skip("copies are not recognized")
	}
	root := t.TempDir()
	at := func(name string) string { return filepath.Join(root, name) }
	q, err := codeq.Open(at("queue"), &codeq.Options{Shards: 2})
	require.NoError(t, err)
	var tasks []codeq.ID
	for shard := range 2 {
		id, err := queuetest.StartingAt(q, shard).Produce(context.Background(), codeq.Task{Queue: "a"})
		require.NoError(t, err)
		tasks = append(tasks, id)
	}
	copyDirectory(t, at("queue"), at("live"))
	require.NoError(t, q.Checkpoint(context.Background(), at("checkpoint")))
	require.NoError(t, q.Close())

	require.NoError(t, os.Truncate(filepath.Join(at("live"), manifest.LockName), 0)) // it names the last owner
	before := testkit.RecursiveListing(t, root)
	content := testkit.ReadFile(t, filepath.Join(at("live"), manifest.Name))
	for range 2 {
		_, err = codeq.Open(at("live"), nil)
		require.ErrorIs(t, err, codeq.ErrCopied)
		require.ErrorContains(t, err, "Checkpoint")
		for _, repair := range []bool{false, true} {
			_, err = codeq.Verify(at("live"), &codeq.VerifyOptions{Repair: repair})
			require.ErrorIs(t, err, codeq.ErrCopied)
		}
	}
	require.Equal(t, before, testkit.RecursiveListing(t, root))
	require.Equal(t, content, testkit.ReadFile(t, filepath.Join(at("live"), manifest.Name)))
	r, err := codeq.Verify(at("live"), &codeq.VerifyOptions{AcceptCopy: true})
	require.NoError(t, err)
	require.True(t, r.OK(), "%v", r.Problems)
	queuetest.RequireTasks(t, at("live"), &codeq.Options{AcceptCopy: true}, tasks)
	queuetest.RequireTasks(t, at("live"), nil, tasks) // is a queue of its own

	for _, from := range []string{"queue", "checkpoint", "live"} { // closed
		copyDirectory(t, at(from), at(from+" copied"))
		r, err := codeq.Verify(at(from+" copied"), nil)
		require.NoError(t, err)
		require.True(t, r.OK(), "%v", r.Problems)
		queuetest.RequireTasks(t, at(from+" copied"), nil, tasks)
	}

	leaveOpen(t, at("queue"), "")
	require.NoError(t, os.Rename(at("queue"), at("renamed")))
	copyDirectory(t, at("renamed"), at("moved"))
	queuetest.RequireTasks(t, at("renamed"), nil, tasks)
	_, err = codeq.Open(at("moved"), nil)
	require.ErrorIs(t, err, codeq.ErrCopied)

	// A copy into the same directory, or into the root of another volume, where the directory has
	// the same inode.
	leaveOpen(t, at("renamed"), "")
	path := filepath.Join(at("renamed"), manifest.Name)
	open := testkit.ReadFile(t, path)
	testkit.WriteFile(t, path+".copy", open)
	require.NoError(t, os.Rename(path+".copy", path))
	_, err = codeq.Open(at("renamed"), nil)
	require.ErrorIs(t, err, codeq.ErrCopied)
	queuetest.RequireTasks(t, at("renamed"), &codeq.Options{AcceptCopy: true}, tasks)
}

// TestCopyOfOpenNode: the directory of a node follows the same rules, for every verb that opens it.
func TestCopyOfOpenNode(t *testing.T) {
	t.Parallel()
	if runtime.GOOS == "windows" {
		t.Skip("copies are not recognized")
	}
	root := t.TempDir()
	at := func(name string) string { return filepath.Join(root, name) }
	options := func(accept bool) *codeq.Options {
		l, err := net.Listen("tcp", "127.0.0.1:0")
		require.NoError(t, err)
		t.Cleanup(func() { _ = l.Close() })
		return &codeq.Options{Shards: 2, AcceptCopy: accept, Cluster: &codeq.Cluster{
			Node: "a", Listener: l, Advertise: "a:1", HeartbeatTimeout: 50 * time.Millisecond,
		}}
	}
	isOpen := func(name string) bool {
		m, err := manifest.Read(vfs.Default, at(name))
		require.NoError(t, err)
		return m.Open != nil
	}
	refused := func(name string) {
		testkit.WriteFile(t, filepath.Join(at(name), manifest.LockName), "") // it names the last owner
		before := testkit.RecursiveListing(t, at(name))
		for range 2 {
			_, err := codeq.Open(at(name), options(false))
			require.ErrorIs(t, err, codeq.ErrCopied)
			require.ErrorContains(t, err, "Checkpoint")
			require.ErrorIs(t, codeq.RecoverCluster(at(name), options(false)), codeq.ErrCopied)
			for _, repair := range []bool{false, true} {
				_, err = codeq.Verify(at(name), &codeq.VerifyOptions{Repair: repair})
				require.ErrorIs(t, err, codeq.ErrCopied)
			}
		}
		require.Equal(t, before, testkit.RecursiveListing(t, at(name)))
	}
	requireTask := func(name string, opts *codeq.Options, id codeq.ID) {
		q, err := codeq.Open(at(name), opts)
		require.NoError(t, err)
		require.Equal(t, codeq.Ready, queuetest.InfoOf(t, q, id).State)
		require.NoError(t, q.Close())
	}

	q, err := codeq.Open(at("node"), options(false))
	require.NoError(t, err)
	id := queuetest.Produce(t, q, codeq.Task{Queue: "a"})[0]
	copyDirectory(t, at("node"), at("live"))
	require.True(t, isOpen("node"))
	require.NoError(t, q.Close())
	require.False(t, isOpen("node"))
	refused("live")

	copyDirectory(t, at("node"), at("closed"))
	requireTask("closed", options(false), id)

	leaveOpen(t, at("node"), "a")
	copyDirectory(t, at("node"), at("moved"))
	refused("moved")
	require.NoError(t, codeq.RecoverCluster(at("moved"), options(true)))
	requireTask("moved", options(false), id) // is a node of its own
	copyDirectory(t, at("node"), at("moved again"))
	requireTask("moved again", options(true), id)
	require.False(t, isOpen("moved again"))
	requireTask("node", options(false), id)
}

// TestOpenThatFails: a failed Open leaves a closed queue closed, so that it may still be copied to
// another place.
func TestOpenThatFails(t *testing.T) {
	t.Parallel()
	root := t.TempDir()
	dir := filepath.Join(root, "queue")
	queuetest.ClosedQueue(t, dir, 2)
	missing := manifest.ShardDir(vfs.Default, dir, 0)
	require.NoError(t, os.Rename(missing, filepath.Join(root, "aside")))
	_, err := codeq.Open(dir, nil)
	require.ErrorIs(t, err, codeq.ErrCorrupt)
	require.NoError(t, os.Rename(filepath.Join(root, "aside"), missing))
	q, err := codeq.Open(dir, nil)
	require.NoError(t, err)
	require.NoError(t, q.Close())
	m, err := manifest.Read(vfs.Default, dir)
	require.NoError(t, err)
	require.Nil(t, m.Open)
	_, err = codeq.Open(dir, &codeq.Options{Shards: 3})
	require.ErrorIs(t, err, codeq.ErrShardCount)
	m, err = manifest.Read(vfs.Default, dir)
	require.NoError(t, err)
	require.Nil(t, m.Open)
}

// killedQueue makes a queue of two shards and kills its process. It calls meanwhile while the
// process works, and produces tasks before and after this call.
func killedQueue(t *testing.T, dir string, meanwhile func()) (tasks []codeq.ID) {
	kill, _ := child(t, "TestHelperProcessServes", serveDirEnv+"="+dir)
	c, err := codeq.OpenLocal(t.Context(), dir)
	require.NoError(t, err)
	for range 20 {
		tasks = append(tasks, queuetest.Produce(t, c, codeq.Task{Queue: "a"})...)
	}
	meanwhile()
	for range 20 {
		tasks = append(tasks, queuetest.Produce(t, c, codeq.Task{Queue: "a"})...)
	}
	kill()
	require.NoError(t, c.Close())
	return tasks
}

// command runs a program of the system, and skips the test if there is none.
func command(t *testing.T, name string, args ...string) {
	t.Helper()
	if _, err := exec.LookPath(name); err != nil {
		t.Skip(err)
	}
	out, err := exec.Command(name, args...).CombinedOutput()
	require.NoError(t, err, "%s %q: %s", name, args, out)
}

// copyWithTimes creates files anew in a directory that has others, with the times of the originals.
func copyWithTimes(t *testing.T, from, to string) {
	require.NoError(t, filepath.WalkDir(from, func(path string, e fs.DirEntry, err error) error {
		require.NoError(t, err)
		rel, err := filepath.Rel(from, path)
		require.NoError(t, err)
		target := filepath.Join(to, rel)
		info, err := e.Info()
		require.NoError(t, err)
		switch {
		case e.IsDir():
			require.NoError(t, os.MkdirAll(target, info.Mode().Perm()))
		case e.Type().IsRegular():
			content := testkit.ReadFile(t, path)
			testkit.WriteFile(t, target+".new", content)
			require.NoError(t, os.Chtimes(target+".new", info.ModTime(), info.ModTime()))
			require.NoError(t, os.Rename(target+".new", target))
		}
		return nil
	}))
}

// TestRestoreOverKilledQueue: a copy that was made while the queue worked is refused when it is
// restored to the place of the queue, in every way.
func TestRestoreOverKilledQueue(t *testing.T) {
	t.Parallel()
	if runtime.GOOS != "linux" {
		t.Skip("the programs are those of GNU")
	}
	for name, restore := range map[string]func(t *testing.T, copied, dir string){
		"cp -a over it": func(t *testing.T, copied, dir string) { command(t, "cp", "-a", copied+"/.", dir) },
		"cp -r over it": func(t *testing.T, copied, dir string) { command(t, "cp", "-r", copied+"/.", dir) },
		"cp -a, emptied": func(t *testing.T, copied, dir string) {
			command(t, "find", dir, "-mindepth", "1", "-delete")
			command(t, "cp", "-a", copied+"/.", dir)
		},
		"cp -a, removed": func(t *testing.T, copied, dir string) {
			require.NoError(t, os.RemoveAll(dir))
			command(t, "cp", "-a", copied, dir)
		},
		"rsync": func(t *testing.T, copied, dir string) { command(t, "rsync", "-a", "--delete", copied+"/", dir) },
		"tar": func(t *testing.T, copied, dir string) {
			command(t, "sh", "-c", `tar -C "$1" -c . | tar -C "$2" -x`, "sh", copied, dir)
		},
		"rename": func(t *testing.T, copied, dir string) {
			require.NoError(t, os.Rename(dir, dir+".old"))
			require.NoError(t, os.Rename(copied, dir))
		},
		"times kept": func(t *testing.T, copied, dir string) { copyWithTimes(t, copied, dir) },
		"one store": func(t *testing.T, copied, dir string) {
			command(t, "rsync", "-a", "--delete", copied+"/shard-001/", dir+"/shard-001")
		},
		"one store, cp": func(t *testing.T, copied, dir string) {
			command(t, "cp", "-a", copied+"/shard-001/.", dir+"/shard-001")
		},
		"hard links": func(t *testing.T, _, dir string) {
			command(t, "cp", "-al", dir, dir+".links")
			require.NoError(t, os.Rename(dir, dir+".old"))
			require.NoError(t, os.Rename(dir+".links", dir))
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			root := t.TempDir()
			dir, copied := filepath.Join(root, "queue"), filepath.Join(root, "copied")
			killedQueue(t, dir, func() { command(t, "cp", "-a", dir, copied) })
			restore(t, copied, dir)
			_, err := codeq.OpenReadOnly(dir, nil)
			require.ErrorIs(t, err, codeq.ErrCopied)
			_, err = codeq.Verify(dir, &codeq.VerifyOptions{Repair: true})
			require.ErrorIs(t, err, codeq.ErrCopied)
			for range 2 {
				_, err = codeq.Open(dir, nil)
				require.ErrorIs(t, err, codeq.ErrCopied)
			}
			q, err := codeq.Open(dir, &codeq.Options{AcceptCopy: true})
			require.NoError(t, err)
			require.NoError(t, q.Close())
			q, err = codeq.Open(dir, nil)
			require.NoError(t, err, "it is a queue of its own")
			require.NoError(t, q.Close())
		})
	}
}

// TestKilledQueueIsNoCopy: no operation on the files of a killed queue, except a copy, makes the
// queue a copy.
func TestKilledQueueIsNoCopy(t *testing.T) {
	t.Parallel()
	if runtime.GOOS != "linux" {
		t.Skip("the programs are those of GNU")
	}
	for name, do := range map[string]func(t *testing.T, dir string){
		"nothing": func(*testing.T, string) {},
		"chmod":   func(t *testing.T, dir string) { command(t, "chmod", "-R", "u+rwX,g+r", dir) },
		"chown":   func(t *testing.T, dir string) { command(t, "chown", "-R", fmt.Sprint(os.Getuid()), dir) },
		"touch": func(t *testing.T, dir string) {
			command(t, "find", dir, "-exec", "touch", "-h", "-d", "2001-01-01", "{}", "+")
		},
		"touched now": func(t *testing.T, dir string) {
			command(t, "find", dir, "-exec", "touch", "-h", "{}", "+")
		},
		"rename": func(t *testing.T, dir string) {
			require.NoError(t, os.Rename(dir, dir+".moved"))
			require.NoError(t, os.Mkdir(dir, 0o700)) // takes no inode of the other
			require.NoError(t, os.Remove(dir))
			require.NoError(t, os.Rename(dir+".moved", dir))
		},
		"mv of what is in it": func(t *testing.T, dir string) {
			require.NoError(t, os.Rename(dir, dir+".old"))
			require.NoError(t, os.Mkdir(dir, 0o700))
			command(t, "sh", "-c", `mv "$1"/* "$2"`, "sh", dir+".old", dir)
		},
		"a hard link": func(t *testing.T, dir string) {
			command(t, "cp", "-al", dir, dir+".links")
			require.NoError(t, os.RemoveAll(dir+".links"))
		},
		"a look": func(t *testing.T, dir string) {
			r, err := codeq.OpenReadOnly(dir, nil)
			require.NoError(t, err)
			require.NoError(t, r.Close())
			report, err := codeq.Verify(dir, nil)
			require.NoError(t, err)
			require.True(t, report.OK(), "%v", report.Problems)
		},
		"copied from": func(t *testing.T, dir string) { command(t, "cp", "-a", dir, dir+".copied") },
		"rsync of nothing new": func(t *testing.T, dir string) {
			command(t, "cp", "-a", dir, dir+".copied")
			command(t, "rsync", "-a", dir+".copied/", dir)
		},
		"without links": func(t *testing.T, dir string) { command(t, "find", dir, "-type", "l", "-delete") },
		"without records": func(t *testing.T, dir string) {
			command(t, "find", dir, "-name", "PLACE*", "-delete")
		},
		"a record cut short": func(t *testing.T, dir string) {
			require.NoError(t, os.Truncate(filepath.Join(dir, "shard-000", "PLACE"), 5))
		},
		"an Open that fails": func(t *testing.T, dir string) {
			store := manifest.ShardDir(vfs.Default, dir, 1)
			require.NoError(t, os.Rename(store, dir+".aside"))
			for range 3 {
				_, err := codeq.Open(dir, nil)
				require.ErrorIs(t, err, codeq.ErrCorrupt)
			}
			require.NoError(t, os.Rename(dir+".aside", store))
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			dir := filepath.Join(t.TempDir(), "queue")
			tasks := killedQueue(t, dir, func() {})
			do(t, dir)
			queuetest.RequireTasks(t, dir, nil, tasks)
			queuetest.RequireTasks(t, dir, nil, tasks)
		})
	}
}

// TestStoresOfOneOpening: a store or a manifest from an earlier copy of the closed queue is
// refused. A copy of the whole queue is not.
func TestStoresOfOneOpening(t *testing.T) {
	t.Parallel()
	for _, part := range []string{"shard-001", manifest.Name} {
		root := t.TempDir()
		dir, backup := filepath.Join(root, "queue"), filepath.Join(root, "backup")
		tasks := queuetest.ClosedQueue(t, dir, 2)
		copyDirectory(t, dir, backup)
		queuetest.RequireTasks(t, dir, nil, tasks)
		require.NoError(t, os.Rename(filepath.Join(dir, part), filepath.Join(root, "aside")))
		if part == manifest.Name {
			testkit.WriteFile(t, filepath.Join(dir, part), testkit.ReadFile(t, filepath.Join(backup, part)))
		} else {
			copyDirectory(t, filepath.Join(backup, part), filepath.Join(dir, part))
		}
		_, err := codeq.Open(dir, nil)
		require.ErrorIs(t, err, codeq.ErrCopied)
		require.ErrorContains(t, err, "opening")
		_, err = codeq.OpenReadOnly(dir, nil)
		require.ErrorIs(t, err, codeq.ErrCopied)
		require.NoError(t, os.RemoveAll(filepath.Join(dir, part)))
		require.NoError(t, os.Rename(filepath.Join(root, "aside"), filepath.Join(dir, part)))
		queuetest.RequireTasks(t, dir, nil, tasks)
		queuetest.RequireTasks(t, backup, nil, tasks)
	}
}

// TestDirectoryIsReplaced: an open queue notices at the latest in Close that its path leads
// elsewhere, and writes nothing there. Acknowledged changes are in its own directory.
func TestDirectoryIsReplaced(t *testing.T) {
	t.Parallel()
	if runtime.GOOS == "windows" {
		t.Skip("an open directory cannot be moved")
	}
	move := func(t *testing.T, dir string) { require.NoError(t, os.Rename(dir, dir+".moved")) }
	for name, test := range map[string]struct {
		do    func(t *testing.T, dir string)
		moved bool // the directory still exists elsewhere
	}{
		"moved": {move, true},
		"moved, another queue there": {func(t *testing.T, dir string) {
			move(t, dir)
			require.NoError(t, os.Rename(dir+".other", dir))
		}, true},
		"moved, an empty directory there": {func(t *testing.T, dir string) {
			move(t, dir)
			require.NoError(t, os.Mkdir(dir, 0o700))
		}, true},
		"moved, a copy there": {func(t *testing.T, dir string) {
			move(t, dir)
			copyDirectory(t, dir+".moved", dir)
		}, true},
		"removed": {func(t *testing.T, dir string) { require.NoError(t, os.RemoveAll(dir)) }, false},
		"removed and made again": {func(t *testing.T, dir string) {
			require.NoError(t, os.RemoveAll(dir))
			require.NoError(t, os.Mkdir(dir, 0o700))
		}, false},
		"emptied": {func(t *testing.T, dir string) {
			names, err := os.ReadDir(dir)
			require.NoError(t, err)
			for _, name := range names {
				require.NoError(t, os.RemoveAll(filepath.Join(dir, name.Name())))
			}
		}, false},
		"a store removed": {func(t *testing.T, dir string) {
			require.NoError(t, os.RemoveAll(manifest.ShardDir(vfs.Default, dir, 1)))
		}, false},
		"a store replaced": {func(t *testing.T, dir string) {
			store := manifest.ShardDir(vfs.Default, dir, 1)
			require.NoError(t, os.Rename(store, dir+".aside"))
			require.NoError(t, os.Rename(manifest.ShardDir(vfs.Default, dir+".other", 1), store))
		}, false},
		"logs removed": {func(t *testing.T, dir string) {
			logs, err := filepath.Glob(filepath.Join(dir, "shard-*", "*.log"))
			require.NoError(t, err)
			require.NotEmpty(t, logs)
			for _, log := range logs {
				require.NoError(t, os.Remove(log))
			}
		}, false},
		"logs replaced": {func(t *testing.T, dir string) {
			logs, err := filepath.Glob(filepath.Join(dir, "shard-*", "*.log"))
			require.NoError(t, err)
			require.NotEmpty(t, logs)
			for _, log := range logs {
				testkit.WriteFile(t, log+".copy", testkit.ReadFile(t, log))
				require.NoError(t, os.Rename(log+".copy", log))
			}
		}, false},
	} {
		for _, works := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s, works on: %t", name, works), func(t *testing.T) {
				t.Parallel()
				ofLogs := strings.HasPrefix(name, "logs ")
				dir := filepath.Join(t.TempDir(), "queue")
				queuetest.ClosedQueue(t, dir+".other", 2)
				opts := &codeq.Options{Shards: 2, Durability: codeq.DurabilityDisk, MemTableBytes: 256 << 10}
				q, err := codeq.Open(dir, opts)
				require.NoError(t, err)
				var tasks []codeq.ID
				for range 80 {
					tasks = append(tasks, queuetest.Produce(t, q, codeq.Task{Queue: "a"})...)
				}
				test.do(t, dir)
				before := contentOf(t, dir, dir+".other")
				if works {
					payload := make([]byte, 64<<10)
					rand.NewChaCha8([32]byte{}).Read(payload)
					for err == nil {
						var id codeq.ID
						if id, err = q.Produce(t.Context(), codeq.Task{Queue: "a", Payload: payload}); err == nil {
							tasks = append(tasks, id)
						}
						if ofLogs && len(tasks) > 200 {
							break // new ones take their place
						}
					}
					if !ofLogs {
						require.True(t, errors.Is(err, codeq.ErrFailed) || errors.Is(err, codeq.ErrUncertain), "%v", err)
					}
				}
				if test.moved {
					_, err := codeq.Open(dir+".moved", nil)
					require.ErrorIs(t, err, codeq.ErrLocked, "by its new name")
					_, err = codeq.OpenReadOnly(dir+".moved", nil)
					require.ErrorIs(t, err, codeq.ErrLocked)
				}
				err = q.Close()
				if !works || !ofLogs {
					require.ErrorIs(t, err, codeq.ErrFailed)
					require.ErrorContains(t, err, "was moved, removed or replaced while it was open")
				}
				if name == "logs replaced" && !works {
					_, err := codeq.Open(dir, nil)
					require.ErrorIs(t, err, codeq.ErrCopied, "it was not closed in order")
				}
				if name != "a store removed" && name != "a store replaced" && !ofLogs {
					require.Equal(t, before, contentOf(t, dir, dir+".other"), "nothing is written elsewhere")
				}
				if !test.moved {
					return
				}
				q, err = codeq.Open(dir+".moved", nil)
				require.NoError(t, err, "it is no copy")
				for _, id := range tasks {
					require.Equal(t, codeq.Ready, queuetest.InfoOf(t, q, id).State)
				}
				require.NoError(t, q.Close())
			})
		}
	}
}

// contentOf returns the content of all files in directories, which may be missing.
func contentOf(t *testing.T, dirs ...string) map[string]string {
	t.Helper()
	content := make(map[string]string)
	for _, dir := range dirs {
		err := filepath.WalkDir(dir, func(path string, e fs.DirEntry, err error) error {
			if err == nil {
				content[path] = e.Type().String()
			}
			if err == nil && e.Type().IsRegular() {
				content[path] = string(testkit.ReadFile(t, path))
			}
			return err
		})
		if !errors.Is(err, fs.ErrNotExist) {
			require.NoError(t, err)
		}
	}
	return content
}

// TestNodeIsReplaced: a node notices this too, and seals nothing in the directory that took its
// place.
func TestNodeIsReplaced(t *testing.T) {
	t.Parallel()
	if runtime.GOOS == "windows" {
		t.Skip("an open directory cannot be moved")
	}
	open := func(dir string) *codeq.Queue {
		l, err := net.Listen("tcp", "127.0.0.1:0")
		require.NoError(t, err)
		q, err := codeq.Open(dir, &codeq.Options{Shards: 2, Cluster: &codeq.Cluster{
			Node: "a", Listener: l, Advertise: "a:1", HeartbeatTimeout: 50 * time.Millisecond,
		}})
		require.NoError(t, err)
		return q
	}
	dir := filepath.Join(t.TempDir(), "queue")
	other := open(dir + ".other")
	id := queuetest.Produce(t, other, codeq.Task{Queue: "a"})[0]
	require.NoError(t, other.Close())
	q := open(dir)
	require.NoError(t, q.WaitReady(t.Context()))
	// A store makes its reserve, by its path, with its first commit: there is one in each shard.
	own := queuetest.Produce(t, q, slices.Repeat([]codeq.Task{{Queue: "a"}}, 50)...)[0]
	require.NoError(t, os.Rename(dir, dir+".moved"))
	require.NoError(t, os.Rename(dir+".other", dir))
	before := contentOf(t, dir)
	require.ErrorIs(t, q.Close(), codeq.ErrFailed)
	require.Equal(t, before, contentOf(t, dir))
	for dir, id := range map[string]codeq.ID{dir: id, dir + ".moved": own} {
		q := open(dir)
		require.Equal(t, codeq.Ready, queuetest.InfoOf(t, q, id).State)
		require.NoError(t, q.Close())
	}
}

// TestSocketOfAnother: when the directory of a queue was moved, Close does not remove the socket of
// the queue that took its place.
func TestSocketOfAnother(t *testing.T) {
	t.Parallel()
	if runtime.GOOS != "linux" {
		t.Skip("it depends on the system whether a socket may be renamed")
	}
	dir := filepath.Join(t.TempDir(), "q")
	serve := func(dir string) (q *codeq.Queue, ended <-chan error) {
		q, err := codeq.Open(dir, &codeq.Options{Shards: 1})
		require.NoError(t, err)
		end := make(chan error, 1)
		go func() { end <- q.ServeLocal(context.Background()) }()
		for { // until it is served
			c, err := codeq.OpenLocal(t.Context(), dir)
			if err == nil {
				require.NoError(t, c.Close())
				return q, end
			}
			require.ErrorIs(t, err, codeq.ErrNotServed)
			runtime.Gosched()
		}
	}
	first, firstEnded := serve(dir)
	require.NoError(t, os.Rename(dir, dir+".moved"))
	second, secondEnded := serve(dir)
	require.ErrorIs(t, first.Close(), codeq.ErrFailed)
	require.ErrorIs(t, <-firstEnded, codeq.ErrFailed)
	c, err := codeq.OpenLocal(t.Context(), dir)
	require.NoError(t, err)
	queuetest.Produce(t, c, codeq.Task{Queue: "a"})
	require.NoError(t, c.Close())
	require.NoError(t, second.Close())
	require.ErrorIs(t, <-secondEnded, codeq.ErrClosed)
}

// mount mounts a file system until the test ends. Only root may do that.
func mount(t *testing.T, target string, args ...string) {
	t.Helper()
	if runtime.GOOS != "linux" || os.Geteuid() != 0 {
		t.Skip("only root mounts file systems")
	}
	if out, err := exec.Command("mount", append(args, target)...).CombinedOutput(); err != nil {
		t.Skipf("mount %q: %v: %s", args, err, out)
	}
	t.Cleanup(func() { _ = exec.Command("umount", target).Run() })
}

// TestOverlayIsNoCopy: the inodes of directories of an overlayfs change when they leave memory.
func TestOverlayIsNoCopy(t *testing.T) {
	t.Parallel()
	root := t.TempDir()
	at := func(name string) string { return filepath.Join(root, name) }
	for _, name := range []string{"lower", "upper", "merged"} {
		require.NoError(t, os.Mkdir(at(name), 0o700))
	}
	mount(t, at("lower"), "-t", "tmpfs", "none") // or all layers are of one file system
	require.NoError(t, os.Mkdir(at("upper/files"), 0o700))
	require.NoError(t, os.Mkdir(at("upper/work"), 0o700))
	mount(t, at("merged"), "-t", "overlay", "overlay", "-o",
		fmt.Sprintf("xino=off,lowerdir=%s,upperdir=%s,workdir=%s", at("lower"), at("upper/files"), at("upper/work")))
	dir := at("merged/queue")
	tasks := killedQueue(t, dir, func() {})
	info, err := os.Stat(dir)
	require.NoError(t, err)
	if err := os.WriteFile("/proc/sys/vm/drop_caches", []byte("2"), 0); err != nil {
		t.Skip(err)
	}
	again, err := os.Stat(dir)
	require.NoError(t, err)
	t.Log("the directory has another inode:", !os.SameFile(info, again))
	queuetest.RequireTasks(t, dir, nil, tasks)
	copyWithTimes(t, dir, at("merged/copied"))
	queuetest.RequireTasks(t, at("merged/copied"), nil, tasks)
	tasks = killedQueue(t, at("merged/other"), func() {})
	copyWithTimes(t, at("merged/other"), at("merged/other copied"))
	_, err = codeq.Open(at("merged/other copied"), nil)
	require.ErrorIs(t, err, codeq.ErrCopied)
	queuetest.RequireTasks(t, at("merged/other"), nil, tasks)
}

// TestBindMount: a queue has one owner for all of its paths, and a mount over it is another
// directory.
func TestBindMount(t *testing.T) {
	t.Parallel()
	root := t.TempDir()
	dir, bound := filepath.Join(root, "queue"), filepath.Join(root, "bound")
	tasks := queuetest.ClosedQueue(t, dir, 2)
	require.NoError(t, os.Mkdir(bound, 0o700))
	mount(t, bound, "--bind", dir)
	q, err := codeq.Open(dir, nil)
	require.NoError(t, err)
	for range 2 {
		_, err = codeq.Open(bound, nil)
		require.ErrorIs(t, err, codeq.ErrLocked)
		_, err = codeq.OpenReadOnly(bound, nil)
		require.ErrorIs(t, err, codeq.ErrLocked)
		_, err = codeq.Verify(bound, nil)
		require.ErrorIs(t, err, codeq.ErrLocked)
	}
	tasks = append(tasks, queuetest.Produce(t, q, codeq.Task{Queue: "a"})...)
	require.NoError(t, q.Close())
	queuetest.RequireTasks(t, bound, nil, tasks)

	q, err = codeq.Open(dir, nil)
	require.NoError(t, err)
	other := filepath.Join(root, "other")
	queuetest.ClosedQueue(t, other, 2)
	before := contentOf(t, other)
	mount(t, dir, "--bind", other)
	require.ErrorIs(t, q.Close(), codeq.ErrFailed)
	require.Equal(t, before, contentOf(t, other))
	queuetest.RequireTasks(t, bound, nil, tasks)
}
