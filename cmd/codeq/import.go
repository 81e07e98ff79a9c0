package main

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/urfave/cli/v3"

	"codeq"
	"codeq/internal/keys"
	"codeq/internal/offline"
	"codeq/internal/platform"
)

func (a *app) importCommand() *cli.Command {
	return &cli.Command{
		Name: "import", Category: categoryKeep, Usage: "create a directory from an export",
		Description: "Reads an export and creates the directory -dir, which must be missing or empty, with -shards\n" +
			"shards. Tasks get new IDs; -ids writes old and new ones. -dir appears when it is complete and\n" +
			"verified: until then the work is in -dir.importing, which is removed if the import fails. An\n" +
			"empty -dir keeps its owner and mode, may be a mounted volume or a link to a directory, and has a\n" +
			"directory .importing meanwhile. -dry-run checks each line, and the place of the new directory.",
		Flags: []cli.Flag{
			&cli.StringFlag{Name: "file", Usage: "read this `FILE`; default: the standard input"},
			&cli.IntFlag{Name: "shards", Usage: "create `N` shards; default: the number in the export"},
			&cli.StringFlag{Name: "ids", Usage: "write the old and the new ID of each task to this new `FILE`, as JSON lines"},
			&cli.BoolFlag{Name: "dry-run", Usage: "read the whole export, and create nothing"},
		},
		Action: a.importTasks,
	}
}

// importResult is the JSON output of import.
type importResult struct {
	Dir    string
	Shards int
	offline.Counts
	DryRun bool `json:",omitzero"`
}

func (a *app) importTasks(ctx context.Context, c *cli.Command) (err error) {
	t, err := a.directory(c)
	if err != nil {
		return err
	}
	shards := c.Int("shards")
	if c.IsSet("shards") && (shards < 1 || shards > maxShards) {
		return usagef(c, "-shards %d: 1 to %d are possible", shards, maxShards)
	}
	from := a.in
	if name := c.String("file"); name != "" {
		f, err := os.Open(name)
		if err != nil {
			return coded(exitOther, err)
		}
		defer func() { _ = f.Close() }() // it was only read
		from = f
	}
	place, err := placeOf(t.dir)
	if err != nil {
		return err
	}
	if err := place.check(from); err != nil {
		return err
	}
	p := a.progress()
	defer p.end()
	o := offline.ImportConfig{Shards: shards, Progress: p.tell}
	if c.Bool("dry-run") {
		if err := canMake(c.String("ids")); err != nil {
			return err
		}
		done, err := offline.CheckExport(ctx, from, o)
		if err != nil {
			return transferError(err)
		}
		p.end()
		return a.showImport(importResult{t.dir, done.Shards, done.Counts, true})
	}
	ids, finish, err := newFile(c.String("ids"), io.Discard)
	if err != nil {
		return err
	}
	defer func() { err = finish(err) }()
	lines := bufio.NewWriter(ids)
	if c.IsSet("ids") {
		e := json.NewEncoder(lines)
		o.Named = func(old, id keys.ID) error { return e.Encode(struct{ Old, New codeq.ID }{old, id}) }
	}
	done, err := place.make(func(dir string) (offline.ImportResult, error) {
		r, err := offline.Import(ctx, platform.FS, dir, from, o)
		return r, errors.Join(err, lines.Flush())
	})
	if err != nil {
		return transferError(err)
	}
	p.end()
	return a.showImport(importResult{t.dir, done.Shards, done.Counts, false})
}

// maxShards is the maximum number of shards of a queue.
const maxShards = 256

func (a *app) showImport(r importResult) error {
	did := "imported"
	if r.DryRun {
		did = "would import"
	}
	return a.result(r, "%s %d tasks, %d schedules, the settings of %d queues, %d keys of tasks that are gone into %s, %d shards",
		did, r.Tasks, r.Schedules, r.Settings, r.Keys, r.Dir, r.Shards)
}

// place is the target directory of an import with its work directory, which is beside it until it
// is complete. An existing empty directory is filled, since it may be the root of a volume or
// belong to a service; then the work directory is inside it.
type place struct {
	dir, work string
	exists    bool
}

// importMark is the file that marks a work directory.
const importMark = "IMPORT"

// workSuffix ends the name of a work directory. Inside an empty directory it is the whole name.
const workSuffix = ".importing"

// placeOf returns the place of a new directory.
func placeOf(dir string) (*place, error) {
	dir, err := filepath.Abs(dir)
	if err != nil {
		return nil, err
	}
	if info, err := os.Stat(dir); err == nil && info.IsDir() {
		if dir, err = filepath.EvalSymlinks(dir); err != nil {
			return nil, err
		}
		return &place{dir, filepath.Join(dir, workSuffix), true}, nil
	}
	if err := platform.DanglingLink(dir); err != nil {
		return nil, coded(exitRefused, err)
	}
	return &place{dir, dir + workSuffix, false}, nil
}

func (p *place) queue() string { return filepath.Join(p.work, "queue") }

// check checks that the directory can be made, without changes.
func (p *place) check(from io.Reader) error {
	killed := false
	if names, err := platform.FS.List(p.work); !errors.Is(err, fs.ErrNotExist) && len(names) != 0 {
		if killed = slices.Contains(names, importMark); !killed {
			return coded(exitRefused, fmt.Errorf("%s exists, but is not from an import", p.work))
		}
	}
	if err := p.isFree(killed); err != nil {
		return err
	}
	above := filepath.Dir(p.work)
	for filepath.Dir(above) != above {
		if _, err := os.Stat(above); !errors.Is(err, fs.ErrNotExist) {
			break
		}
		above = filepath.Dir(above)
	}
	probe, err := os.MkdirTemp(above, ".codeq-import-*")
	if err == nil {
		err = os.Remove(probe)
	}
	if err != nil {
		return fmt.Errorf("a new directory in %s: %w", above, err)
	}
	// The import writes every task twice, each time in fewer bytes than the export.
	needs := uint64(offline.KeepFree)
	if f, ok := from.(*os.File); ok {
		if info, err := f.Stat(); err == nil && info.Mode().IsRegular() {
			needs += 2 * uint64(info.Size())
		}
	}
	if usage, err := platform.FS.GetDiskUsage(above); err == nil && usage.AvailBytes < needs {
		return fmt.Errorf("%w: %d bytes are free in %s, and the import needs up to %d", codeq.ErrDiskFull, usage.AvailBytes, above, needs)
	}
	return nil
}

// isFree checks that the directory is missing, or has only files of a killed import.
func (p *place) isFree(killed bool) error {
	names, err := platform.FS.List(p.dir)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return coded(exitRefused, err)
	}
	for _, name := range names {
		if name != workSuffix && !(killed && isStore(name)) && !offline.IsOfVolume(platform.FS, p.dir, name) {
			return coded(exitRefused, fmt.Errorf("%s is not empty, it has %q: import makes a new directory, or fills an empty one", p.dir, name))
		}
	}
	return nil
}

func isStore(name string) bool { return strings.HasPrefix(name, "shard-") }

// make fills the work directory, moves it to its place, and makes it durable. After an error
// nothing is left.
func (p *place) make(fill func(dir string) (offline.ImportResult, error)) (done offline.ImportResult, err error) {
	unlock, err := p.begin()
	if err != nil {
		return done, err
	}
	defer func() {
		err = errors.Join(err, unlock())
	}()
	if done, err = fill(p.queue()); err == nil {
		err = p.finish()
	}
	return done, err
}

// begin makes and locks the work directory, and clears the remains of an interrupted import.
func (p *place) begin() (end func() error, err error) {
	if err := platform.FS.MkdirAll(p.work, platform.DirMode); err != nil {
		return nil, err
	}
	lock, err := platform.FS.Lock(filepath.Join(p.work, importMark))
	if err != nil {
		if errors.Is(err, platform.ErrHeld) {
			err = fmt.Errorf("%w: another import makes %s: %w", codeq.ErrLocked, p.dir, err)
		}
		return nil, err
	}
	killed := false
	names, err := os.ReadDir(p.work)
	for _, name := range names {
		if name.Name() != importMark {
			killed = true
			err = errors.Join(err, os.RemoveAll(filepath.Join(p.work, name.Name())))
		}
	}
	if err == nil && p.exists {
		err = p.prepare(killed)
	}
	if err != nil {
		return nil, errors.Join(err, lock.Close())
	}
	return func() error { return errors.Join(os.RemoveAll(p.work), lock.Close()) }, nil
}

// prepare gives the queue the owner of the existing directory, and removes the files of a killed
// import. From then on no queue can be created there.
func (p *place) prepare(killed bool) error {
	err := p.isFree(killed)
	if err == nil && killed {
		err = p.clear()
	}
	if err == nil {
		err = os.Mkdir(p.queue(), platform.DirMode)
	}
	for _, dir := range []string{p.work, p.queue()} {
		if err == nil {
			err = platform.GiveDirectory(dir)
		}
	}
	return err
}

// clear removes the stores from a directory without a manifest.
func (p *place) clear() error {
	names, err := os.ReadDir(p.dir)
	for _, name := range names {
		if isStore(name.Name()) {
			err = errors.Join(err, os.RemoveAll(filepath.Join(p.dir, name.Name())))
		}
	}
	return err
}

// finish moves the directory to its place.
func (p *place) finish() error {
	err := filepath.WalkDir(p.queue(), func(path string, d fs.DirEntry, err error) error {
		if err != nil || !d.Type().IsRegular() && !d.IsDir() {
			return err
		}
		return syncFile(path, d.IsDir())
	})
	if err != nil {
		return err
	}
	if p.exists {
		return p.fillIn()
	}
	if err := os.Rename(p.queue(), p.dir); err != nil {
		return err
	}
	return p.placed(filepath.Dir(p.dir))
}

// fillIn moves the queue into the existing directory, the manifest last: before that, it is not a
// queue.
func (p *place) fillIn() error {
	names, err := os.ReadDir(p.queue())
	if err == nil {
		err = p.isFree(false)
	}
	if err != nil {
		return err
	}
	move := func(name string) {
		if err == nil {
			err = os.Rename(filepath.Join(p.queue(), name), filepath.Join(p.dir, name))
		}
	}
	for _, name := range names {
		if isStore(name.Name()) { // LOCK is created anew
			move(name.Name())
		}
	}
	if err == nil {
		err = syncFile(p.dir, true)
	}
	if move(offline.ManifestName); err != nil {
		return errors.Join(err, p.clear())
	}
	return p.placed(p.dir)
}

// placed makes the directory's entry in its parent durable.
func (p *place) placed(in string) error {
	if err := syncFile(in, true); err != nil {
		return coded(exitUncertain, fmt.Errorf("%s is there, and may be lost by a power failure: %w", p.dir, err))
	}
	return nil
}
