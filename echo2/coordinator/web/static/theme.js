// Before the first paint: the theme that was chosen, else the system's.
try { const chosen = localStorage.getItem("echo2-theme"); if (chosen) document.documentElement.dataset.theme = chosen; } catch { /* storage is off */ }
