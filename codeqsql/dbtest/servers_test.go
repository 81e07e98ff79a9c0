package dbtest

import (
	"bufio"
	"database/sql"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/user"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"

	_ "github.com/go-sql-driver/mysql"
	_ "github.com/jackc/pgx/v5/stdlib"
	"github.com/stretchr/testify/require"
	_ "modernc.org/sqlite"
)

// program finds a program in PATH, or where Debian keeps it.
func program(name string) (string, error) {
	if path, err := exec.LookPath(name); err == nil {
		return filepath.EvalSymlinks(path)
	}
	for _, pattern := range []string{"/usr/lib/postgresql/*/bin/", "/usr/sbin/"} {
		found, err := filepath.Glob(pattern + name)
		if err == nil && len(found) > 0 {
			slices.Sort(found)
			return found[len(found)-1], nil
		}
	}
	return "", fmt.Errorf("%w: %s", errNoServer, name)
}

var errNoServer = errors.New("no such program: apt-get install postgresql mariadb-server-core")

// root is the directory of all servers, which TestMain removes.
var root = sync.OnceValues(func() (string, error) { return newDir("") })

// newDir makes a directory that belongs to the user of the servers.
func newDir(in string) (string, error) {
	dir, err := os.MkdirTemp(in, "codeqsql-")
	if err != nil {
		return "", err
	}
	if c, err := unprivileged(); err != nil {
		return "", err
	} else if c != nil {
		return dir, os.Chown(dir, int(c.Uid), int(c.Gid))
	}
	return dir, nil
}

// unprivileged is the user of the servers, which refuse root; nil: that of the tests.
func unprivileged() (*syscall.Credential, error) {
	if os.Geteuid() != 0 {
		return nil, nil
	}
	nobody, err := user.Lookup("nobody")
	if err != nil {
		return nil, err
	}
	uid, err := strconv.ParseUint(nobody.Uid, 10, 32)
	if err != nil {
		return nil, err
	}
	gid, err := strconv.ParseUint(nobody.Gid, 10, 32)
	return &syscall.Credential{Uid: uint32(uid), Gid: uint32(gid)}, err
}

// asUser is a command of the user of the servers.
func asUser(dir, name string, args ...string) (*exec.Cmd, error) {
	credential, err := unprivileged()
	cmd := exec.Command(name, args...)
	cmd.Dir = dir
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: credential}
	return cmd, err
}

// emptyPostgres is the directory of a database cluster that was made once, and is copied.
var emptyPostgres = sync.OnceValues(func() (string, error) {
	initdb, err := program("initdb")
	if err != nil {
		return "", err
	}
	in, err := root()
	if err != nil {
		return "", err
	}
	dir, err := newDir(in)
	if err != nil {
		return "", err
	}
	cmd, err := asUser(dir, initdb, "-D", dir+"/data", "-A", "trust", "-U", "codeq", "--no-sync", "--no-instructions",
		"--locale=C", "--encoding=UTF8")
	if err != nil {
		return "", err
	}
	if out, err := cmd.CombinedOutput(); err != nil {
		return "", fmt.Errorf("initdb: %w: %s", err, out)
	}
	return dir + "/data", nil
})

// server is a process of a database.
type server struct {
	dir     string
	command []string // that starts it
	ready   string   // its log line then
	driver  string
	dsn     string

	ended chan struct{} // closed when its output ends
	kill  func()        // ends all of its processes without a warning, unless they have ended
}

// newPostgres starts a server of PostgreSQL. Its data survive a kill, and no power failure.
func newPostgres() (*server, error) {
	empty, err := emptyPostgres()
	if err != nil {
		return nil, err
	}
	postgres, err := program("postgres")
	if err != nil {
		return nil, err
	}
	dir, err := newDir(filepath.Dir(filepath.Dir(empty)))
	if err != nil {
		return nil, err
	}
	cmd, err := asUser(dir, "cp", "-r", empty, dir+"/data")
	if err != nil {
		return nil, err
	}
	if out, err := cmd.CombinedOutput(); err != nil {
		return nil, fmt.Errorf("cp: %w: %s", err, out)
	}
	s := &server{
		dir: dir, ready: "ready to accept connections", driver: "pgx",
		dsn: "host=" + dir + " user=codeq dbname=postgres sslmode=disable",
		command: []string{postgres, "-D", dir + "/data", "-c", "listen_addresses=", "-c", "unix_socket_directories=" + dir,
			"-c", "fsync=off", "-c", "max_connections=50", "-c", "restart_after_crash=off", "-c", "autovacuum=off"},
	}
	return s, s.start()
}

// newMariaDB starts a server of MariaDB. Its data survive a kill, and no power failure.
func newMariaDB() (*server, error) {
	mariadbd, err := program("mariadbd")
	if err != nil {
		return nil, err
	}
	in, err := root()
	if err != nil {
		return nil, err
	}
	dir, err := newDir(in)
	if err != nil {
		return nil, err
	}
	s := &server{
		dir: dir, ready: "ready for connections", driver: "mysql",
		dsn: "root@unix(" + dir + "/socket)/codeq",
		command: []string{mariadbd, "--no-defaults", "--datadir=" + dir, "--socket=" + dir + "/socket", "--skip-networking",
			"--skip-grant-tables", "--innodb-flush-log-at-trx-commit=2", "--innodb-log-file-size=8M",
			"--innodb-buffer-pool-size=64M", "--max-connections=50"},
	}
	if err := s.start(); err != nil {
		return nil, err
	}
	db, err := sql.Open(s.driver, strings.TrimSuffix(s.dsn, "codeq"))
	if err != nil {
		return nil, err
	}
	defer db.Close()
	if _, err := db.Exec("CREATE DATABASE codeq"); err != nil {
		return nil, err
	}
	// Killed before its first checkpoint, a new server does not start again.
	if _, err := db.Exec("SHUTDOWN"); err != nil {
		return nil, err
	}
	<-s.ended
	return s, s.restart()
}

// script runs a server until its standard input ends, and kills it with its children. Its output
// ends when all of them have.
const script = `exec 3>&1 >/dev/null
"$@" >&3 2>&1 3>&- &
exec 3>&-
read _
kill -9 $! $(cat /proc/$!/task/$!/children)
wait $!`

// start starts the server, and waits until it serves. It ends with this process at the latest.
func (s *server) start() error {
	cmd, err := asUser(s.dir, "sh", append([]string{"-c", script, "sh"}, s.command...)...)
	if err != nil {
		return err
	}
	stdin, err := cmd.StdinPipe()
	if err != nil {
		return err
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		return err
	}
	if err := cmd.Start(); err != nil {
		return err
	}
	ended := make(chan struct{})
	s.ended = ended
	s.kill = sync.OnceFunc(func() {
		_ = stdin.Close()
		<-ended
		_ = cmd.Wait()
	})
	var log strings.Builder
	lines := bufio.NewScanner(out)
	for lines.Scan() {
		log.WriteString(lines.Text() + "\n")
		if strings.Contains(lines.Text(), s.ready) {
			go func() {
				defer close(ended)
				_, _ = io.Copy(io.Discard, out)
			}()
			return nil
		}
	}
	close(ended)
	s.kill()
	return fmt.Errorf("%s did not start:\n%s", s.command[0], log.String())
}

// restart kills the server and starts it again.
func (s *server) restart() error {
	s.kill()
	return s.start()
}

// servers are those that all tests share.
var (
	sharedMu sync.Mutex // guards shared
	shared   []*server

	postgres = sync.OnceValues(func() (*server, error) { return share(newPostgres()) })
	mariaDB  = sync.OnceValues(func() (*server, error) { return share(newMariaDB()) })
)

func share(s *server, err error) (*server, error) {
	if err == nil {
		sharedMu.Lock()
		defer sharedMu.Unlock()
		shared = append(shared, s)
	}
	return s, err
}

// stopServers ends the shared servers, and removes the files of all.
func stopServers() {
	for _, s := range shared {
		s.kill()
	}
	if dir, err := root(); err == nil {
		_ = os.RemoveAll(dir)
	}
}

// need skips or fails a test if there is no server.
func need(t *testing.T, s *server, err error) *server {
	t.Helper()
	if errors.Is(err, errNoServer) && os.Getenv("CODEQ_DATABASES") != "required" {
		t.Skip(err)
	}
	require.NoError(t, err)
	return s
}

// owned is a server of one test.
func owned(t *testing.T, s *server, err error) *server {
	t.Helper()
	need(t, s, err)
	t.Cleanup(func() { s.kill() })
	return s
}
