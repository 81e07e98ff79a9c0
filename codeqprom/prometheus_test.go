package codeqprom_test

import (
	"bufio"
	"encoding/json"
	"fmt"
	"net/http"
	"net/http/httptest"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"
	"github.com/stretchr/testify/require"

	"codeq"
)

// program returns the path of a program of Debian's package prometheus. Without it the test fails
// in CI, which installs it, and is skipped elsewhere.
func program(t *testing.T, name string) string {
	t.Helper()
	path, err := exec.LookPath(name)
	if err == nil {
		return path
	}
	if os.Getenv("CI") != "" {
		t.Fatalf("%s is missing, which .ci/run installs (package prometheus): %v", name, err)
	}
	t.Skipf("%s is not installed: this test needs the package prometheus (apt-get install prometheus)", name)
	return ""
}

func readFile(t *testing.T, path string) string {
	t.Helper()
	text, err := os.ReadFile(path)
	require.NoError(t, err)
	return string(text)
}

var alertName = regexp.MustCompile(`(?m)^\s*- alert: (\w+)`)

// alertNames are the names of the alerts in the rules.
func alertNames(t *testing.T) (names []string) {
	for _, m := range alertName.FindAllStringSubmatch(readFile(t, "contrib/alerts.yml"), -1) {
		names = append(names, m[1])
	}
	require.NotEmpty(t, names)
	return names
}

// TestAlerts: promtool accepts the rules. In its tests each alert fires when it should, and only
// then.
func TestAlerts(t *testing.T) {
	t.Parallel()
	promtool := program(t, "promtool")
	for _, args := range [][]string{{"check", "rules", "alerts.yml"}, {"test", "rules", "alerts_test.yml"}} {
		c := exec.CommandContext(t.Context(), promtool, args...)
		c.Dir = "contrib"
		out, err := c.CombinedOutput()
		require.NoError(t, err, "%s", out)
		require.Contains(t, string(out), "SUCCESS")
	}
}

// TestAlertsAreTested: each alert fires in a unit test, and docs/operations.md says what to do.
func TestAlertsAreTested(t *testing.T) {
	t.Parallel()
	tests, manual := readFile(t, "contrib/alerts_test.yml"), readFile(t, "../docs/operations.md")
	for _, name := range alertNames(t) {
		require.Regexp(t, `alertname: `+name+`\n\s+exp_alerts:\n\s+- exp_labels`, tests, name)
		require.Contains(t, manual, "| `"+name+"` |")
	}
}

// panels are the expressions of the dashboard.
func panels(t *testing.T) (exprs []string) {
	t.Helper()
	var dashboard struct {
		Panels []struct {
			Type, Title string
			Targets     []struct{ Expr string }
		}
	}
	require.NoError(t, json.Unmarshal([]byte(readFile(t, "contrib/dashboard.json")), &dashboard))
	for _, p := range dashboard.Panels {
		require.Equal(t, p.Type == "row", len(p.Targets) == 0, p.Title)
		for _, target := range p.Targets {
			exprs = append(exprs, target.Expr)
		}
	}
	require.NotEmpty(t, exprs)
	return exprs
}

var metricName = regexp.MustCompile(`\bcodeq_\w+`)

// TestContribNamesMetrics: the alerts and the dashboard ask for metrics that exist, and the
// dashboard shows all of them.
func TestContribNamesMetrics(t *testing.T) {
	t.Parallel()
	documented := make(map[string]bool)
	for _, m := range row.FindAllStringSubmatch(readFile(t, "doc.go"), -1) {
		documented[m[1]] = true
	}
	suffix := regexp.MustCompile(`_(bucket|sum|count)$`)
	shown := make(map[string]bool)
	for _, name := range metricName.FindAllString(strings.Join(panels(t), "\n"), -1) {
		name = suffix.ReplaceAllString(name, "")
		require.True(t, documented[name], name)
		shown[name] = true
	}
	require.Equal(t, documented, shown)
	for _, name := range metricName.FindAllString(readFile(t, "contrib/alerts.yml"), -1) {
		require.True(t, documented[name], name)
	}
}

// server is a running Prometheus.
type server struct{ url string }

// startPrometheus runs a Prometheus that scrapes targets, with the alert rules, until the test has
// ended.
func startPrometheus(t *testing.T, targets []string) *server {
	t.Helper()
	path, dir := program(t, "prometheus"), t.TempDir()
	rules, err := filepath.Abs("contrib/alerts.yml")
	require.NoError(t, err)
	list, err := json.Marshal(targets)
	require.NoError(t, err)
	config := fmt.Sprintf(`
global: {scrape_interval: 500ms, scrape_timeout: 500ms, evaluation_interval: 200ms}
rule_files: [%q]
scrape_configs:
  - job_name: codeq
    static_configs: [{targets: %s}]
`, rules, list)
	file := filepath.Join(dir, "prometheus.yml")
	require.NoError(t, os.WriteFile(file, []byte(config), 0o600))
	c := exec.Command(path, "--config.file="+file, "--storage.tsdb.path="+filepath.Join(dir, "data"), "--web.listen-address=127.0.0.1:0")
	log, err := c.StderrPipe()
	require.NoError(t, err)
	require.NoError(t, c.Start())
	address, ended := make(chan string, 1), make(chan []string, 1)
	go func() {
		var lines []string
		listening := regexp.MustCompile(`msg="Listening on" address=(\S+)`)
		for scan := bufio.NewScanner(log); scan.Scan(); {
			lines = append(lines, scan.Text())
			if m := listening.FindStringSubmatch(scan.Text()); m != nil {
				address <- m[1]
			}
		}
		ended <- lines
	}()
	t.Cleanup(func() {
		_ = c.Process.Kill()
		lines := <-ended
		_ = c.Wait()
		if t.Failed() {
			t.Log(strings.Join(lines, "\n"))
		}
	})
	select {
	case a := <-address:
		return &server{"http://" + a}
	case lines := <-ended:
		ended <- lines
		require.Fail(t, "Prometheus has ended")
	case <-time.After(patience):
		require.Fail(t, "Prometheus does not listen")
	}
	return nil
}

// get asks the HTTP API. While Prometheus starts, it answers with errors.
func (s *server) get(t *testing.T, path string, into any) bool {
	t.Helper()
	r, err := http.Get(s.url + "/api/v1/" + path)
	require.NoError(t, err)
	defer func() { _ = r.Body.Close() }()
	var answer struct {
		Status, Error string
		Data          json.RawMessage
	}
	if r.StatusCode == http.StatusServiceUnavailable || json.NewDecoder(r.Body).Decode(&answer) != nil {
		return false
	}
	require.Equal(t, "success", answer.Status, "%s: %s", path, answer.Error)
	require.NoError(t, json.Unmarshal(answer.Data, into))
	return true
}

// query returns the values of an expression by their labels.
func (s *server) query(t *testing.T, expr string) map[string]string {
	t.Helper()
	var data struct {
		Result []struct {
			Metric map[string]string
			Value  [2]any
		}
	}
	if !s.get(t, "query?query="+url.QueryEscape(expr), &data) {
		return nil
	}
	all := make(map[string]string)
	for _, r := range data.Result {
		var labels []string
		for name, value := range r.Metric {
			labels = append(labels, name+"="+value)
		}
		slices.Sort(labels)
		all[strings.Join(labels, ",")] = r.Value[1].(string)
	}
	return all
}

// TestPrometheus: a real Prometheus scrapes the nodes of a cluster, and has the right counts, also
// after the end of a node. It can evaluate all expressions of the dashboard and all alerts, and the
// right alert fires.
func TestPrometheus(t *testing.T) {
	t.Parallel()
	program(t, "prometheus") // first, since it skips
	nodes := openCluster(t)
	var targets []string
	for _, n := range nodes {
		r := prometheus.NewRegistry()
		r.MustRegister(n.metrics)
		s := httptest.NewServer(promhttp.HandlerFor(r, promhttp.HandlerOpts{}))
		t.Cleanup(s.Close)
		targets = append(targets, s.Listener.Addr().String())
		require.NoError(t, n.Configure(t.Context(), "run", func(s *codeq.Settings) { s.Retention = time.Hour }))
	}
	s := startPrometheus(t, targets)
	is := func(expr string, want map[string]string) {
		t.Helper()
		var got map[string]string
		require.Eventually(t, func() bool {
			got = s.query(t, expr)
			return fmt.Sprint(got) == fmt.Sprint(want)
		}, patience, 50*time.Millisecond, "%s: %v", expr, &got)
	}
	is(`sum(up{job="codeq"})`, map[string]string{"": "3"})
	for _, n := range nodes {
		produceAndRun(t, n.Queue)
	}
	is(`sum by (queue, state) (codeq_tasks) > 0`, map[string]string{"queue=run,state=done": "3", "queue=wait,state=ready": "3"})
	// A worker that ends may have claimed a task that it gives back.
	is(`sum by (queue, event) (codeq_task_events_total{event!~"claimed|released"}) > 0`, map[string]string{
		"event=produced,queue=run": "3", "event=produced,queue=wait": "3", "event=completed,queue=run": "3",
	})
	is(`sum by (queue) (codeq_handler_seconds_count)`, map[string]string{"queue=run": "3"})
	is(`max by (shard) (codeq_shard_up)`, map[string]string{"shard=0": "1", "shard=1": "1", "shard=2": "1"})
	is(`sum(codeq_raft_follower_up)`, map[string]string{"": "6"})

	runBatch(t, nodes[0].Queue)
	dashboard := strings.NewReplacer("$job", "codeq", "$queue", ".*", "$__rate_interval", "1m")
	for _, expr := range panels(t) {
		expr = dashboard.Replace(expr)
		require.Eventually(t, func() bool {
			return len(s.query(t, expr)) > 0 || strings.HasSuffix(expr, "> 0")
		}, patience, 50*time.Millisecond, expr)
	}

	require.NoError(t, nodes[2].Close())
	is(`sum by (queue, state) (codeq_tasks) > 0`, map[string]string{"queue=run,state=done": "3", "queue=wait,state=ready": "3"})
	is(`max by (shard) (codeq_shard_up)`, map[string]string{"shard=0": "1", "shard=1": "1", "shard=2": "1"})
	is(`max by (node, shard) (codeq_raft_follower_up{node="n2"})`, map[string]string{"node=n2,shard=0": "0", "node=n2,shard=1": "0", "node=n2,shard=2": "0"})
	var rules struct {
		Groups []struct {
			Rules []struct{ Name, Type, Health, State, LastError string }
		}
	}
	require.Eventually(t, func() bool {
		state := make(map[string]string)
		if !s.get(t, "rules", &rules) {
			return false
		}
		for _, g := range rules.Groups {
			for _, r := range g.Rules {
				if r.Health != "ok" {
					return false
				}
				if r.Type == "alerting" && r.State != "inactive" {
					state[r.Name] = r.State
				}
			}
		}
		return state["CodeqFollowerDown"] == "pending" && state["CodeqShardDown"] == ""
	}, patience, 50*time.Millisecond, "%+v", &rules)
	require.Len(t, rules.Groups, 2)
}
