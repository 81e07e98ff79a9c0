package codeqweb

import (
	"bytes"
	"compress/gzip"
	"crypto/sha256"
	"embed"
	"fmt"
	"html/template"
	"net/http"
	"net/url"
	"path"
	"strings"
	"sync"
	"time"

	"codeq"
)

//go:embed assets
var assetFiles embed.FS

// assetNames lists the files that pages load. Those of assets/lib are libraries of others, each
// with its license beside it.
var assetNames = []string{
	"style.css", "live.js", "times.js", "charts.js", "palette.js", "tree.js", "flow.js",
	"lib/idiomorph.js", "lib/uplot.css", "lib/uplot.js", "lib/dagre.js",
}

var assetKinds = map[string]string{".css": "text/css; charset=utf-8", ".js": "text/javascript; charset=utf-8"}

// asset is a file that pages load, as it is and compressed. Its path has a hash of its content.
type asset struct {
	body, packed []byte
	kind, path   string
}

// loadAssets reads the embedded files once for all dashboards of the process, by name.
var loadAssets = sync.OnceValue(func() map[string]*asset {
	assets := make(map[string]*asset)
	for _, name := range assetNames {
		body, err := assetFiles.ReadFile("assets/" + name)
		if err != nil {
			panic(err) // they are embedded
		}
		ext := path.Ext(name)
		where := fmt.Sprintf("assets/%s.%.6x%s", strings.TrimSuffix(name, ext), sha256.Sum256(body), ext)
		w, err := gzip.NewWriterLevel(nil, gzip.BestCompression)
		if err != nil {
			panic(err) // the level is valid
		}
		assets[name] = &asset{body, packed(body, w), assetKinds[ext], where}
	}
	return assets
})

// packed compresses an answer with a writer, which it resets.
func packed(body []byte, w *gzip.Writer) []byte {
	var b bytes.Buffer
	w.Reset(&b)
	_, err := w.Write(body)
	if err == nil {
		err = w.Close()
	}
	if err != nil {
		panic(err) // memory takes all
	}
	return b.Bytes()
}

// packers are writers for pages: a new one costs more than a page.
var packers = sync.Pool{New: func() any {
	w, err := gzip.NewWriterLevel(nil, gzip.BestSpeed)
	if err != nil {
		panic(err) // the level is valid
	}
	return w
}}

// loadPages reads the assets and the templates of the pages.
func (d *Dashboard) loadPages() {
	d.assets = make(map[string]*asset)
	for _, a := range loadAssets() {
		d.assets[a.path] = a
	}
	funcs := template.FuncMap{
		"t": visible, "line": line, "field": field, "n": number, "rate": rate, "size": size, "span": span, "ago": distance, "age": age,
		"full": exact, "short": short, "iso": machine, "clock": clock, "zoned": inZone, "url": link, "join": strings.Join,
		"form":     func(action string, p url.Values) string { return action + "?" + p.Encode() },
		"quantile": func(s codeq.UpkeepStats, f float64) string { return span(s.Quantile(f)) },
		"asset":    func(name string) string { return loadAssets()[name].path },
		"percent": func(part, whole int64) string {
			if whole == 0 {
				return "0 %"
			}
			return fmt.Sprintf("%d %%", 100*part/whole)
		},
		"zero": func(t time.Time) bool { return t.IsZero() },
		"task": func(id codeq.ID) bool { return id != codeq.ID{} },
		"pair": func(name string, v any) namedValue { return namedValue{name, v} },
	}
	layout := template.Must(template.New("layout").Funcs(funcs).ParseFS(assetFiles, "assets/layout.html"))
	d.templates = make(map[string]*template.Template)
	for _, name := range screens {
		d.templates[name] = template.Must(template.Must(layout.Clone()).ParseFS(assetFiles, "assets/"+name+".html"))
	}
}

type namedValue struct {
	Name  string
	Value any
}

func serveAsset(w http.ResponseWriter, r *request, a *asset) error {
	if r.Method != http.MethodGet && r.Method != http.MethodHead {
		w.Header().Set("Allow", http.MethodGet)
		return &refusal{http.StatusMethodNotAllowed, "method", "this takes GET"}
	}
	h := w.Header()
	h.Set("Content-Type", a.kind)
	h.Set("Cache-Control", "public, max-age=31536000, immutable")
	body := a.body
	if h.Set("Vary", "Accept-Encoding"); takesGzip(r.Request) {
		h.Set("Content-Encoding", "gzip")
		body = a.packed
	}
	_, err := w.Write(body)
	return err
}

// takesGzip reports whether a client takes compressed answers.
func takesGzip(r *http.Request) bool {
	for coding := range strings.SplitSeq(r.Header.Get("Accept-Encoding"), ",") {
		name, weight, _ := strings.Cut(strings.TrimSpace(coding), ";")
		if strings.TrimSpace(name) == "gzip" {
			weight = strings.ReplaceAll(weight, " ", "")
			return weight != "q=0" && strings.Trim(weight, "0.") != "q="
		}
	}
	return false
}
